// norms[n] = max(the Frobenius norm of matrix n, EPS), and y = gram / norms^2
const MATRICES: u32 = 1u;
const RANK: u32 = 4u;
const EPS: f32 = 1e-7;

@group(0) @binding(0) var<storage, read_write> gram: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<storage, read_write> norms: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = linear_index(group, local);
    if (at >= MATRICES * RANK * RANK) { return; }
    let n = at / (RANK * RANK);
    var t = 0.0;
    for (var i = 0u; i < RANK; i++) { t += gram[(n * RANK + i) * RANK + i]; }
    let norm = max(sqrt(t), EPS);
    y[at] = gram[at] / norm / norm;
    if (at % (RANK * RANK) == 0u) { norms[n] = norm; }
}
