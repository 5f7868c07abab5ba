// y[t, c] (+)= x[t, c] * keep / (1 - p), where keep is hashed from the token's keys, the module and the column, so that it
// does not depend on packing, other adapters or resuming. draws[t] = (key, key, p * 2^32, bits of 1 / (1 - p)).
const ROWS: u32 = 4u;
const COLS: u32 = 8u;
const MODULE: u32 = 0u;
const ACCUMULATE: bool = false;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> draws: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= ROWS * COLS) { return; }
    let v = dropped_value(x[i], draws[i / COLS], MODULE, i % COLS);
    if (ACCUMULATE) { y[i] += v; } else { y[i] = v; }
}
