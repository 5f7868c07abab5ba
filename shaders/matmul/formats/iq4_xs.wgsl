// IQ4_XS: d (scale - 32) level, scale of 6 bits for 32 values, d for 256.
alias Scale = f32;

fn scale_at(w: Matrix, at: u32, step: u32) -> Scale {
    let word = w.scales + step / 256u * 2u * w.out + at;
    let first = scales[word];
    let block = (step / 32u) & 7u;
    let scale = ((scales[word + w.out] >> (4u * block)) & 15u) | (((first >> (16u + 2u * block)) & 3u) << 4u);
    return half_of(first, 0u) * (f32(scale) - 32.0);
}

fn scale_count(out: u32, size_in: u32) -> u32 { return size_in / 256u * 2u * out; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: u32, d: Scale) -> Octet {
    return Octet(
        vec4<f32>(level(bits), level(bits >> 4u), level(bits >> 8u), level(bits >> 12u)) * d,
        vec4<f32>(level(bits >> 16u), level(bits >> 20u), level(bits >> 24u), level(bits >> 28u)) * d,
    );
}
