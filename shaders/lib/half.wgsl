// Two 16-bit floats in a word, without the shader-f16 feature.
fn bf16_low(word: u32) -> f32 { return bitcast<f32>(word << 16u); }
fn bf16_high(word: u32) -> f32 { return bitcast<f32>(word & 0xffff0000u); }
fn f16_low(word: u32) -> f32 { return unpack2x16float(word).x; }
fn f16_high(word: u32) -> f32 { return unpack2x16float(word).y; }

// v rounded to f16, to the nearest and of two equally near to the even one, in integers: `quantizeToF16` and
// `pack2x16float` may round either way. Infinite from 65520 on.
fn nearest_f16(v: f32) -> f32 {
    let bits = bitcast<u32>(v);
    let size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) { return v; }
    if (size >= 0x477ff000u) { return bitcast<f32>((bits & 0x80000000u) | 0x7f800000u); }
    if (size < 0x38800000u) { return round(v * 16777216.0) * 5.9604644775390625e-8; } // below 2^-14, in steps of 2^-24
    return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
}
