// hits[r] = 1 if no logit is larger than the target's, by the softmax's state (m, sum, target's logit); 0 for rows >= count[0].
const ROWS: u32 = 4u;

@group(0) @binding(0) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> count: array<u32>;
@group(0) @binding(2) var<storage, read_write> hits: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let r = linear_index(group, local);
    if (r >= ROWS) { return; }
    hits[r] = select(0.0, 1.0, r < count[0] && state[r].z >= state[r].x);
}
