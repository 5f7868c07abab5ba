// Q5_K: (d scale) code - dmin low, scale and low of 6 bits for 32 values, d and dmin for 256; the fifth bits are a plane.
alias Scale = vec2<f32>;

fn scale_at(w: Matrix, row: u32, step: u32) -> Scale {
    let at = w.scales + step / 256u * 4u * w.out + row;
    let halves = scales[at];
    let block = step / 32u;
    let shift = 8u * (block & 3u);
    let first = scales[at + w.out] >> shift;
    let second = scales[at + 2u * w.out] >> shift;
    let rest = scales[at + 3u * w.out] >> shift;
    let upper = (block & 4u) != 0u;
    let scale = select(first & 63u, (rest & 15u) | ((first >> 2u) & 48u), upper);
    let low = select(second & 63u, ((rest >> 4u) & 15u) | ((second >> 2u) & 48u), upper);
    return Scale(half_of(halves, 0u) * f32(scale), -half_of(halves, 1u) * f32(low));
}

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 256u * 4u * out; }

fn decode8(bits: vec2<u32>, s: Scale) -> Octet {
    let low = four_nibbles(bits.x, 0u) | (four_bits(bits.y, 0u) << vec4<u32>(4u));
    let high = four_nibbles(bits.x, 16u) | (four_bits(bits.y, 4u) << vec4<u32>(4u));
    let lowest = vec4<f32>(s.y);
    return Octet(vec4<f32>(low) * s.x + lowest, vec4<f32>(high) * s.x + lowest);
}
