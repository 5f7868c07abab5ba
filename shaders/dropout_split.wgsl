// dropped = x keep / (1 - p), with keep as in dropout.wgsl, and rest = x - dropped.
const ROWS: u32 = 4u;
const COLS: u32 = 8u;
const MODULE: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> draws: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dropped: array<f32>;
@group(0) @binding(3) var<storage, read_write> rest: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= ROWS * COLS) { return; }
    let v = dropped_value(x[i], draws[i / COLS], MODULE, i % COLS);
    dropped[i] = v;
    rest[i] = x[i] - v;
}
