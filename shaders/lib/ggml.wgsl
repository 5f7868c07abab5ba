// Half floats of a word, exactly: drivers may flush small ones in unpack2x16float, and d of a block often is one.
fn half_of(word: u32, index: u32) -> f32 {
    let bits = word >> (16u * (index & 1u));
    let size = bits & 0x7fffu;
    let magnitude = select(bitcast<f32>((size << 13u) + 0x38000000u), f32(size) * 5.9604644775390625e-8, size < 0x400u);
    return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
}

// Words of scales are at [word][out].
fn scale_row(w: Matrix, row: u32) -> u32 { return row; }

// The half float of a block of 32 values, of which a word has those of two neighbouring blocks.
fn half_scale(w: Matrix, at: u32, step: u32) -> f32 {
    return half_of(scales[w.scales + step / 64u * w.out + at], step / 32u);
}

// Both half floats of a block of 32 values.
fn scale_and_low(w: Matrix, at: u32, step: u32) -> vec2<f32> {
    let word = scales[w.scales + step / 32u * w.out + at];
    return vec2<f32>(half_of(word, 0u), half_of(word, 1u));
}

// Of 32 values in a block of 256: d times a scale of 6 bits, and dmin times a low of 6 bits. The last four of eight have the upper
// bits of the first four's bytes.
fn six_bit_scales(w: Matrix, at: u32, step: u32) -> vec2<f32> {
    let word = w.scales + step / 256u * 4u * w.out + at;
    let halves = scales[word];
    let block = step / 32u;
    let shift = 8u * (block & 3u);
    let first = scales[word + w.out] >> shift;
    let second = scales[word + 2u * w.out] >> shift;
    let rest = scales[word + 3u * w.out] >> shift;
    let upper = (block & 4u) != 0u;
    let scale = select(first & 63u, (rest & 15u) | ((first >> 2u) & 48u), upper);
    let low = select(second & 63u, ((rest >> 4u) & 15u) | ((second >> 2u) & 48u), upper);
    return vec2<f32>(half_of(halves, 0u) * f32(scale), -half_of(halves, 1u) * f32(low));
}

// Four codes of 4 bits, or of 1 or 2, from `shift` on.
fn four_nibbles(bits: u32, shift: u32) -> vec4<u32> {
    return (vec4<u32>(bits) >> (vec4<u32>(0u, 4u, 8u, 12u) + shift)) & vec4<u32>(15u);
}
fn four_bits(bits: u32, shift: u32) -> vec4<u32> {
    return (vec4<u32>(bits) >> (vec4<u32>(0u, 1u, 2u, 3u) + shift)) & vec4<u32>(1u);
}
fn four_pairs(bits: u32, shift: u32) -> vec4<u32> {
    return (vec4<u32>(bits) >> (vec4<u32>(0u, 2u, 4u, 6u) + shift)) & vec4<u32>(3u);
}

// Codes i and i + 4 of eight, in the halves of a word: their 4 bits, or the upper bit, or two.
fn nibble_pairs(bits: u32) -> vec4<u32> { return (vec4<u32>(bits) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(0x000f000fu); }
fn bit_pairs(bits: u32) -> vec4<u32> {
    return (vec4<u32>((bits & 255u) | (bits << 12u)) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(0x00010001u);
}
fn two_bit_pairs(bits: u32) -> vec4<u32> {
    return (vec4<u32>((bits & 255u) | (bits << 8u)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x00030003u);
}
