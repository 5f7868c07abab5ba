// Repetition, presence and frequency penalties and biases. An edit is (index, factor, difference, 0); each index occurs once.
struct Dims { count: u32 }

@group(0) @binding(0) var<storage, read> edits: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;
@group(0) @binding(2) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= dims.count || edits[i].x == 0xffffffffu) { return; }
    let edit = edits[i];
    let old = scores[edit.x];
    if (old < -1.0e38) { return; } // masked
    let factor = bitcast<f32>(edit.y);
    let scaled = select(old / factor, old * factor, old < 0.0);
    scores[edit.x] = clamp(scaled - bitcast<f32>(edit.z), -1.0e37, 1.0e37);
}
