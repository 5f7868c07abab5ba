// Q8_0: d code, d of 32 values, codes with a sign. A word of scales has d of two neighbouring blocks.
alias Scale = f32;
const ZERO = 128.0;

fn scale_place(w: Matrix, step: u32) -> vec2<u32> { return half_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: vec2<u32>) -> Scale { return half_scale(at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return (size_in + 63u) / 64u * out; }

fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
}

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: vec2<u32>, d: Scale) -> Octet {
    return Octet(signed_bytes(bits.x) * d, signed_bytes(bits.y) * d);
}
