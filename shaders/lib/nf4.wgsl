// The NormalFloat4 codebook of QLoRA (Dettmers et al. 2023, appendix E), as in bitsandbytes.
const NF4 = array<f32, 16>(
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
);

// A tree of selects, because a dynamically indexed array would spill to memory.
fn nf4_value(code: u32) -> f32 {
    let b0 = (code & 1u) != 0u;
    let b1 = (code & 2u) != 0u;
    let b2 = (code & 4u) != 0u;
    let low = select(
        select(select(NF4[0], NF4[1], b0), select(NF4[2], NF4[3], b0), b1),
        select(select(NF4[4], NF4[5], b0), select(NF4[6], NF4[7], b0), b1), b2);
    let high = select(
        select(select(NF4[8], NF4[9], b0), select(NF4[10], NF4[11], b0), b1),
        select(select(NF4[12], NF4[13], b0), select(NF4[14], NF4[15], b0), b1), b2);
    return select(low, high, (code & 8u) != 0u);
}
