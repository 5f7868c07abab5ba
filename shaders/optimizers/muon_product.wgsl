// y = A I + B x + C x z, for matrices [RANK, RANK]
const MATRICES: u32 = 1u;
const RANK: u32 = 4u;
const A: f32 = 0.0;
const B: f32 = 0.0;
const C: f32 = 1.0;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> z: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = linear_index(group, local);
    if (at >= MATRICES * RANK * RANK) { return; }
    let j = at % RANK;
    let row = at - j;
    let first = at - at % (RANK * RANK);
    var t = 0.0;
    for (var k = 0u; k < RANK; k++) { t = fma(x[row + k], z[first + k * RANK + j], t); }
    y[at] = select(0.0, A, row - first == j * RANK) + B * x[at] + C * t;
}
