// Q4_1: d code + m, d and m of 32 values.
alias Scale = vec2<f32>;
const ZERO = 0.0;

fn scale_place(w: Matrix, step: u32) -> u32 { return w.scales + step / 32u * w.out; }
fn scale_from(w: Matrix, at: u32, place: u32) -> Scale { return scale_and_low(place + at); }

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 32u * out; }

fn affine(s: Scale) -> vec2<f32> { return s; }

fn decode8(bits: u32, s: Scale) -> Octet {
    let low = vec4<f32>(s.y);
    return Octet(vec4<f32>(four_nibbles(bits, 0u)) * s.x + low, vec4<f32>(four_nibbles(bits, 16u)) * s.x + low);
}
