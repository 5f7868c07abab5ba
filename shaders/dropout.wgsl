// y[t, c] (+)= x[t, c] * keep / (1 - p), where keep is hashed from the token's keys, the module and the column, so that it
// does not depend on packing, other adapters or resuming. draws[t] = (key, key, p * 2^32, bits of 1 / (1 - p)).
const ROWS: u32 = 4u;
const COLS: u32 = 8u;
const MODULE: u32 = 0u;
const ACCUMULATE: bool = false;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> draws: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// PCG's output permutation (O'Neill 2014), as a hash.
fn pcg(v: u32) -> u32 {
    let state = v * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= ROWS * COLS) { return; }
    let draw = draws[i / COLS];
    let random = pcg(draw.x ^ pcg(draw.y ^ pcg(MODULE ^ pcg(i % COLS))));
    let v = select(0.0, x[i] * bitcast<f32>(draw.w), random >= draw.z);
    if (ACCUMULATE) { y[i] += v; } else { y[i] = v; }
}
