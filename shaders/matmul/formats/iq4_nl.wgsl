// IQ4_NL: d level, d of 32 values. A word of scales has d of two neighbouring blocks.
alias Scale = f32;

fn scale_place(w: Matrix, step: u32) -> vec2<u32> { return half_place(w, step); }
fn scale_from(w: Matrix, at: u32, place: vec2<u32>) -> Scale { return half_scale(at, place); }

fn scale_count(out: u32, size_in: u32) -> u32 { return (size_in + 63u) / 64u * out; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: u32, d: Scale) -> Octet {
    return Octet(
        vec4<f32>(level(bits), level(bits >> 4u), level(bits >> 8u), level(bits >> 12u)) * d,
        vec4<f32>(level(bits >> 16u), level(bits >> 20u), level(bits >> 24u), level(bits >> 28u)) * d,
    );
}
