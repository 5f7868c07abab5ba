// y = VALUE
const SIZE: u32 = 64u;
const VALUE: f32 = 0.0;

@group(0) @binding(0) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    y[i] = VALUE;
}
