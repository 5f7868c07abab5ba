// NF4 of rows that are not whole octets, so that eight neighbours may have two scales: see nf4.wgsl.
alias Scale = Octet;

fn scale_of(w: Matrix, index: u32) -> f32 { return scales[w.scales + min(index, w.out * w.size_in - 1u) / 64u]; }

fn scale_row(w: Matrix, row: u32) -> u32 { return row * w.size_in; }

fn scale_at(w: Matrix, at: u32, step: u32) -> Scale {
    let i = at + step;
    return Octet(
        vec4<f32>(scale_of(w, i), scale_of(w, i + 1u), scale_of(w, i + 2u), scale_of(w, i + 3u)),
        vec4<f32>(scale_of(w, i + 4u), scale_of(w, i + 5u), scale_of(w, i + 6u), scale_of(w, i + 7u)),
    );
}

fn scale_count(out: u32, size_in: u32) -> u32 { return (out * size_in + 63u) / 64u; }

fn decode8(bits: u32, scale: Scale) -> Octet {
    return Octet(
        vec4<f32>(level(bits), level(bits >> 4u), level(bits >> 8u), level(bits >> 12u)) * scale.low,
        vec4<f32>(level(bits >> 16u), level(bits >> 20u), level(bits >> 24u), level(bits >> 28u)) * scale.high,
    );
}
