// Rotates the pairs (x[i], x[i + DIM / 2]) of every head by the angle of the row's position; SIGN -1 rotates back.
// The table is computed on the host in float64, because WGSL's sin and cos are inaccurate for large angles.
const ROWS: u32 = 4u;
const HEADS: u32 = 2u;
const DIM: u32 = 8u;
const SIGN: f32 = 1.0;
const ACCUMULATE: bool = false;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let index = linear_index(group, local);
    if (index >= ROWS * HEADS * (DIM / 2u)) { return; }
    let pair = index % (DIM / 2u);
    let head = index / (DIM / 2u);
    let turn = table[positions[head / HEADS] * (DIM / 2u) + pair];
    let low = head * DIM + pair;
    let high = low + DIM / 2u;
    let a = x[low];
    let b = x[high];
    let first = a * turn.x - b * turn.y * SIGN;
    let second = b * turn.x + a * turn.y * SIGN;
    if (ACCUMULATE) {
        y[low] += first;
        y[high] += second;
    } else {
        y[low] = first;
        y[high] = second;
    }
}
