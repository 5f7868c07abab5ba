// dgate = dy * up * s * (1 + gate * (1 - s)), dup = dy * gate * s, with s = sigmoid(gate)
const SIZE: u32 = 64u;

@group(0) @binding(0) var<storage, read_write> gate: array<f32>;
@group(0) @binding(1) var<storage, read_write> up: array<f32>;
@group(0) @binding(2) var<storage, read_write> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> dgate: array<f32>;
@group(0) @binding(4) var<storage, read_write> dup: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let g = gate[i];
    let s = 1.0 / (1.0 + exp(-g));
    let d = dy[i];
    dgate[i] = d * up[i] * s * (1.0 + g * (1.0 - s));
    dup[i] = d * g * s;
}
