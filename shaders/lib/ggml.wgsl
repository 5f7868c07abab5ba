// The half float of a word from bit `shift` on, exactly: drivers may flush small ones in unpack2x16float, and d of a block often is
// one.
fn half_of(word: u32, shift: u32) -> f32 {
    let bits = word >> shift;
    let normal = bitcast<f32>(((bits & 0x7fffu) << 13u) + 0x38000000u);
    let magnitude = min(normal, 2.0 * normal - 6.103515625e-5); // a small one has an exponent more and no leading 1
    return bitcast<f32>(bitcast<u32>(magnitude) | ((bits << 16u) & 0x80000000u));
}

// Words of scales are at [word][out]. A format's scale_place has the words of a step, and shifts.
fn scale_row(w: Matrix, row: u32) -> u32 { return row; }
fn scale_at(w: Matrix, at: u32, step: u32) -> Scale { return scale_from(w, at, scale_place(w, step)); }

// The half float of a block of 32 values, of which a word has those of two neighbouring blocks.
fn half_place(w: Matrix, step: u32) -> vec2<u32> { return vec2<u32>(w.scales + step / 64u * w.out, ((step / 32u) & 1u) * 16u); }
fn half_scale(at: u32, place: vec2<u32>) -> f32 { return half_of(scales[place.x + at], place.y); }

// Both half floats of a block of 32 values.
fn scale_and_low(word: u32) -> vec2<f32> { return vec2<f32>(half_of(scales[word], 0u), half_of(scales[word], 16u)); }

// Of 32 values in a block of 256: d times a scale of 6 bits, and dmin times a low of 6 bits. The last four of eight have the upper
// bits of the first four's bytes.
struct SixBits { word: u32, last: bool, scale: u32, low: u32, upper: u32 }
fn six_bit_place(w: Matrix, step: u32) -> SixBits {
    let shift = 8u * ((step / 32u) & 3u);
    let last = (step / 128u) & 1u;
    return SixBits(w.scales + step / 256u * 4u * w.out, last == 1u, shift, shift + 4u * last, shift + 2u * last);
}
fn six_bit_scales(w: Matrix, at: u32, place: SixBits) -> vec2<f32> {
    let word = place.word + at;
    let halves = scales[word];
    let first = vec2<u32>(scales[word + w.out], scales[word + 2u * w.out]);
    let lower = select(first, vec2<u32>(scales[word + 3u * w.out]), place.last) >> vec2<u32>(place.scale, place.low);
    let six = vec2<f32>((lower & vec2<u32>(15u)) | ((first >> vec2<u32>(place.upper)) & vec2<u32>(48u)));
    return vec2<f32>(half_of(halves, 0u) * six.x, -half_of(halves, 16u) * six.y);
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
