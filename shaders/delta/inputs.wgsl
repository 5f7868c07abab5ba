// y[t] = silu(sum_j weight[c, TAPS - 1 - j] x[t - j, c]) of COLS columns c, where the inputs before the batch are in the state of
// the row's sequence [TAPS - 1, COLS], which is replaced; then its decays, and zeros up to a multiple of 4.
// A lane has a column of all rows of a sequence, so that it reads the state before it writes it.
const COLS: u32 = 8u;
const HEADS: u32 = 2u;
const TAPS: u32 = 4u;
const WIDTH = COLS + (HEADS + 3u) / 4u * 4u;

struct Dims { rows: u32 }

@group(0) @binding(0) var<storage, read> runs: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> a: array<f32>;
@group(0) @binding(5) var<storage, read> a_log: array<f32>;
@group(0) @binding(6) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
@group(0) @binding(8) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let index = linear_index(group, local);
    let row = index / WIDTH;
    let column = index % WIDTH;
    if (row >= dims.rows) { return; }
    if (column >= COLS) {
        let head = column - COLS;
        var decay = 0.0;
        if (head < HEADS) {
            let value = a[row * HEADS + head] + dt_bias[head];
            decay = exp(-exp(a_log[head]) * (max(value, 0.0) + log_1p(exp(-abs(value)))));
        }
        y[index] = decay;
        return;
    }
    let run = runs[row];
    if (run.x != 0u) { return; }
    let base = run.z * (TAPS - 1u) * COLS + column;
    for (var t = 0u; t < run.y; t++) {
        var total = 0.0;
        for (var back = 0u; back < TAPS; back++) {
            var value = 0.0;
            if (back <= t) {
                value = x[(row + t - back) * COLS + column];
            } else if (run.w != 0u) {
                value = state[base + (TAPS - 1u + t - back) * COLS];
            }
            total += weight[column * TAPS + TAPS - 1u - back] * value;
        }
        y[(row + t) * WIDTH + column] = total * sigmoid(total);
    }
    if (run.z == 0xffffffffu) { return; }
    for (var i = 0u; i < TAPS - 1u; i++) {  // each reads what is behind it, which is not yet overwritten
        let back = TAPS - 2u - i;
        var value = 0.0;
        if (back < run.y) {
            value = x[(row + run.y - 1u - back) * COLS + column];
        } else if (run.w != 0u) {
            value = state[base + (i + run.y) * COLS];
        }
        state[base + i * COLS] = value;
    }
}
