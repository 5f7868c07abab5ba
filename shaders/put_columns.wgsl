// y[r, first .. first + width] = x[r]; other columns are unchanged
const COLS: u32 = 8u;
const WIDTH: u32 = 4u;
const FIRST: u32 = 0u;

struct Dims { rows: u32 }

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= dims.rows * WIDTH) { return; }
    y[i / WIDTH * COLS + FIRST + i % WIDTH] = x[i];
}
