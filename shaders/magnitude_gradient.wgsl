// gradient[s, c] += (sum over chunks of partial[s, chunk, c]) / norm[s, c]; nothing where the norm is 0.
const COLS: u32 = 8u;
const SLOTS: u32 = 1u;
const CHUNKS: u32 = 1u;
const STRIDE: u32 = 64u;
const SLOT_STRIDE: u32 = 1024u;

@group(0) @binding(0) var<storage, read_write> partial: array<f32>;
@group(0) @binding(1) var<storage, read> norm: array<f32>;
@group(0) @binding(2) var<storage, read_write> gradient: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SLOTS * COLS) { return; }
    let s = i / COLS;
    let c = i % COLS;
    let n = norm[s * STRIDE + c];
    if (n == 0.0) { return; }
    var total = 0.0;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) { total += partial[(s * CHUNKS + chunk) * COLS + c]; }
    gradient[s * SLOT_STRIDE + c] += total / n;
}
