// dx[t, h, 0] = dy[t, h], of the two parts of each head
const DIM: u32 = 4u;
const SIZE: u32 = 8u;

@group(0) @binding(0) var<storage, read_write> dy: array<f32>;
@group(0) @binding(1) var<storage, read_write> dx: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    dx[i / DIM * 2u * DIM + i % DIM] = dy[i];
}
