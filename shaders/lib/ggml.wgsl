// Half floats of a word, exactly: drivers may flush small ones in unpack2x16float, and d of a block often is one.
fn half_of(word: u32, index: u32) -> f32 {
    let bits = word >> (16u * (index & 1u));
    let size = bits & 0x7fffu;
    let magnitude = select(bitcast<f32>((size << 13u) + 0x38000000u), f32(size) * 5.9604644775390625e-8, size < 0x400u);
    return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
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
