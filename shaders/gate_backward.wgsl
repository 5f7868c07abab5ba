// dx = dy sigmoid(gate), and dgates, of the second part of each head, = dy x sigmoid'(gate)
const DIM: u32 = 4u;
const SIZE: u32 = 8u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> gates: array<f32>;
@group(0) @binding(2) var<storage, read_write> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx: array<f32>;
@group(0) @binding(4) var<storage, read_write> dgates: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let at = i / DIM * 2u * DIM + DIM + i % DIM;
    let s = sigmoid(gates[at]);
    dx[i] = dy[i] * s;
    dgates[at] = dy[i] * x[i] * s * sigmoid(-gates[at]);
}
