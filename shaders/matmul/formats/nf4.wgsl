// NF4 (Dettmers et al. 2023): a code of 4 bits is a level, times a scale of 64 values of the flattened W[OUT, IN].
alias Scale = f32;

fn scale_row(w: Matrix, row: u32) -> u32 { return row * w.size_in; }

fn scale_at(w: Matrix, at: u32, step: u32) -> Scale { return scales[w.scales + (at + step) / 64u]; }

fn scale_count(out: u32, size_in: u32) -> u32 { return (out * size_in + 63u) / 64u; }

fn affine(d: Scale) -> vec2<f32> { return vec2<f32>(d, 0.0); }

fn decode8(bits: u32, scale: Scale) -> Octet {
    return Octet(
        vec4<f32>(level(bits), level(bits >> 4u), level(bits >> 8u), level(bits >> 12u)) * scale,
        vec4<f32>(level(bits >> 16u), level(bits >> 20u), level(bits >> 24u), level(bits >> 28u)) * scale,
    );
}
