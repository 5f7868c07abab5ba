// Q6_K: d scale (code - 32), scale of 8 bits for 16 values, d for 256; the upper two bits are a plane. d of two neighbouring
// blocks is in a word, after the scales of all.
alias Scale = f32;
const ZERO = 32.0;

fn scale_place(w: Matrix, step: u32) -> vec4<u32> {
    let words = vec2<u32>(step / 64u, w.size_in / 64u + step / 512u) * w.out + w.scales;
    return vec4<u32>(words, 24u - 8u * ((step / 16u) & 3u), ((step / 256u) & 1u) * 16u);
}
fn scale_from(w: Matrix, at: u32, place: vec4<u32>) -> Scale {
    let scale = i32(scales[place.x + at] << place.z) >> 24u;
    return half_of(scales[place.y + at], place.w) * f32(scale);
}

fn scale_count(out: u32, size_in: u32) -> u32 { return (size_in / 64u + (size_in + 511u) / 512u) * out; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: vec2<u32>, scale: Scale) -> Octet {
    let low = four_nibbles(bits.x, 0u) | (four_pairs(bits.y, 0u) << vec4<u32>(4u));
    let high = four_nibbles(bits.x, 16u) | (four_pairs(bits.y, 8u) << vec4<u32>(4u));
    let zero = vec4<f32>(ZERO);
    return Octet((vec4<f32>(low) - zero) * scale, (vec4<f32>(high) - zero) * scale);
}
