// losses[r] = -logprobs[r]; 0 if weights[r] is 0.
const ROWS: u32 = 4u;

@group(0) @binding(0) var<storage, read_write> logprobs: array<f32>;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read_write> losses: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let r = linear_index(group, local);
    if (r >= ROWS) { return; }
    losses[r] = select(0.0, -logprobs[r], weights[r] != 0.0);
}
