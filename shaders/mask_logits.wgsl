// scores[r, first + c] = logits[r, c] or, where row r has a mask without bit first + c, a logit of probability 0.
const FIRST: u32 = 0u;

struct Dims { rows: u32, cols: u32, vocab: u32 }

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> masked: array<u32>;
@group(0) @binding(2) var<storage, read> masks: array<u32>;
@group(0) @binding(3) var<storage, read_write> scores: array<f32>;
@group(0) @binding(4) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= dims.rows * dims.cols) { return; }
    let row = i / dims.cols;
    let id = FIRST + i % dims.cols;
    var value = logits[i];
    if (masked[row] != 0u && ((masks[row * ((dims.vocab + 31u) / 32u) + id / 32u] >> (id % 32u)) & 1u) == 0u) {
        value = -3.0e38;
    }
    scores[row * dims.vocab + id] = value;
}
