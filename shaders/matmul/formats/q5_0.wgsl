// Q5_0: d (code - 16), d of 32 values; the fifth bits are a plane. A word of scales has d of two neighbouring blocks.
alias Scale = f32;
const ZERO = 16.0;

fn scale_place(w: Matrix, step: u32) -> vec2<u32> { return half_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: vec2<u32>) -> Scale { return half_scale(at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return (size_in + 63u) / 64u * out; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: vec2<u32>, d: Scale) -> Octet {
    let low = four_nibbles(bits.x, 0u) | (four_bits(bits.y, 0u) << vec4<u32>(4u));
    let high = four_nibbles(bits.x, 16u) | (four_bits(bits.y, 4u) << vec4<u32>(4u));
    let zero = vec4<f32>(ZERO);
    return Octet((vec4<f32>(low) - zero) * d, (vec4<f32>(high) - zero) * d);
}
