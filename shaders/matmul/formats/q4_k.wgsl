// Q4_K: (d scale) code - dmin low, scale and low of 6 bits for 32 values, d and dmin for 256.
alias Scale = vec2<f32>;
const ZERO = 0.0;

fn scale_place(w: Matrix, step: u32) -> SixBits { return six_bit_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: SixBits) -> Scale { return six_bit_scales(w, at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 256u * 4u * out; }

fn affine(s: Scale) -> vec2<f32> { return s; }

fn decode8(bits: u32, s: Scale) -> Octet {
    let low = vec4<f32>(s.y);
    return Octet(vec4<f32>(four_nibbles(bits, 0u)) * s.x + low, vec4<f32>(four_nibbles(bits, 16u)) * s.x + low);
}
