// IQ4_XS: d (scale - 32) level, scale of 6 bits for 32 values, d for 256.
alias Scale = f32;

fn scale_place(w: Matrix, step: u32) -> vec3<u32> {
    let block = (step / 32u) & 7u;
    return vec3<u32>(w.scales + step / 256u * 2u * w.out, 4u * block, 12u + 2u * block);
}
fn scale_from(w: Matrix, at: u32, place: vec3<u32>) -> Scale {
    let first = scales[place.x + at];
    let scale = ((scales[place.x + w.out + at] >> place.y) & 15u) | ((first >> place.z) & 48u);
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
