// y[t, h] = x[t, h] sigmoid(gates[t, h, 1]), the gate being the second part of each head
const DIM: u32 = 4u;
const SIZE: u32 = 8u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> gates: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    y[i] = x[i] * sigmoid(gates[i / DIM * 2u * DIM + DIM + i % DIM]);
}
