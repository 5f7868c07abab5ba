// y = x (1 - (logits / CAP)^2), and 0 where x is 0
const SIZE: u32 = 64u;
const CAP: f32 = 30.0;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let share = logits[i] / CAP;
    y[i] = select(x[i] * (1.0 - share * share), 0.0, x[i] == 0.0);
}
