// Q5_K: (d scale) code - dmin low, scale and low of 6 bits for 32 values, d and dmin for 256; the fifth bits are a plane.
alias Scale = vec2<f32>;
const ZERO = 0.0;

fn scale_place(w: Matrix, step: u32) -> SixBits { return six_bit_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: SixBits) -> Scale { return six_bit_scales(w, at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 256u * 4u * out; }

fn affine(s: Scale) -> vec2<f32> { return s; }

fn decode8(bits: vec2<u32>, s: Scale) -> Octet {
    let low = four_nibbles(bits.x, 0u) | (four_bits(bits.y, 0u) << vec4<u32>(4u));
    let high = four_nibbles(bits.x, 16u) | (four_bits(bits.y, 4u) << vec4<u32>(4u));
    let lowest = vec4<f32>(s.y);
    return Octet(vec4<f32>(low) * s.x + lowest, vec4<f32>(high) * s.x + lowest);
}
