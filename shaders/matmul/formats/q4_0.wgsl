// Q4_0: d (code - 8), d of 32 values. A word of scales has d of two neighbouring blocks.
alias Scale = f32;
const ZERO = 8.0;

fn scale_place(w: Matrix, step: u32) -> vec2<u32> { return half_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: vec2<u32>) -> Scale { return half_scale(at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return (size_in + 63u) / 64u * out; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: u32, d: Scale) -> Octet {
    let zero = vec4<f32>(ZERO);
    return Octet((vec4<f32>(four_nibbles(bits, 0u)) - zero) * d, (vec4<f32>(four_nibbles(bits, 16u)) - zero) * d);
}
