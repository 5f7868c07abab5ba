// logits = CAP tanh(logits / CAP)
const SIZE: u32 = 64u;
const CAP: f32 = 30.0;

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let x = logits[i];
    // What is not finite stays so.
    let lost = (bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u;
    logits[i] = select(CAP * accurate_tanh(x / CAP), x - x, lost);
}
