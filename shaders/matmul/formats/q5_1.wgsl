// Q5_1: d code + m, d and m of 32 values; the fifth bits are a plane.
alias Scale = vec2<f32>;
const ZERO = 0.0;

fn scale_place(w: Matrix, step: u32) -> u32 { return w.scales + step / 32u * w.out; }
fn scale_from(w: Matrix, at: u32, place: u32) -> Scale { return scale_and_low(place + at); }

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 32u * out; }

fn affine(s: Scale) -> vec2<f32> { return s; }

fn decode8(bits: vec2<u32>, s: Scale) -> Octet {
    let low = four_nibbles(bits.x, 0u) | (four_bits(bits.y, 0u) << vec4<u32>(4u));
    let high = four_nibbles(bits.x, 16u) | (four_bits(bits.y, 4u) << vec4<u32>(4u));
    let lowest = vec4<f32>(s.y);
    return Octet(vec4<f32>(low) * s.x + lowest, vec4<f32>(high) * s.x + lowest);
}
