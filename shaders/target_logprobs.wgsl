// logprobs[r] = RATE target's logit - (RATE m + log(sum)), from the softmax's state (m, sum, target's logit); 0 for rows >= count[0].
const ROWS: u32 = 4u;
const RATE: f32 = 1.0; // 1 / temperature

@group(0) @binding(0) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> count: array<u32>;
@group(0) @binding(2) var<storage, read_write> logprobs: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let r = linear_index(group, local);
    if (r >= ROWS) { return; }
    let s = state[r];
    logprobs[r] = select(0.0, RATE * s.z - (log(s.y) + RATE * s.x), r < count[0]);
}
