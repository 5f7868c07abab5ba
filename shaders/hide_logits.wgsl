// logits[r, ids[r, s] - FIRST] = LOWEST for ids in [FIRST, FIRST + COLS) and r < count[0].
const ROWS: u32 = 4u;
const KEPT: u32 = 2u;
const COLS: u32 = 8u;
const FIRST: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> ids: array<u32>;
@group(0) @binding(1) var<storage, read> count: array<u32>;
@group(0) @binding(2) var<storage, read_write> logits: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    let row = i / KEPT;
    if (row >= min(ROWS, count[0])) { return; }
    let column = ids[i] - FIRST;
    if (column < COLS) { logits[row * COLS + column] = -3.0e38; }
}
