// y[r] = x[rows_of[r]], unchanged if rows_of[r] is 0xffffffff.
const ROWS: u32 = 4u;
const COLS: u32 = 8u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> rows_of: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= ROWS * COLS) { return; }
    let other = rows_of[i / COLS];
    if (other == 0xffffffffu) { return; }
    y[i] = x[other * COLS + i % COLS];
}
