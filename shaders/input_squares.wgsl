// squares[c] += the sum of x[r, c]^2 over the rows in use: x has rows from `first` on of a batch, whose first `count` are
struct Dims { rows: u32, first: u32, cols: u32 }

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> count: array<u32>;
@group(0) @binding(2) var<storage, read_write> squares: array<f32>;
@group(0) @binding(3) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let col = linear_index(group, local);
    if (col >= dims.cols) { return; }
    let stop = min(dims.rows, max(count[0], dims.first) - dims.first);
    var sum = 0.0;
    for (var row = 0u; row < stop; row++) {
        let v = x[row * dims.cols + col];
        sum = fma(v, v, sum);
    }
    squares[col] += sum;
}
