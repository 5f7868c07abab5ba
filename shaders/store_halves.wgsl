// cache[rows_of[t]] = x[first + cols t ...] rounded to f16, two values per word; nowhere if rows_of[t] is 0xffffffff.
// Values of more than 65504 become that, so that one of them does not spoil the softmax of all later tokens.
const COLS: u32 = 8u;

struct Dims { rows: u32, first: u32 }

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> rows_of: array<u32>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>;
@group(0) @binding(3) var<uniform> dims: Dims;

fn limited(v: f32) -> f32 {
    if ((bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u) { return v; }
    return nearest_f16(clamp(v, -65504.0, 65504.0));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= dims.rows * (COLS / 2u)) { return; }
    let to = rows_of[i / (COLS / 2u)];
    if (to == 0xffffffffu) { return; }
    let at = dims.first + 2u * i;
    cache[to * (COLS / 2u) + i % (COLS / 2u)] = pack2x16float(vec2<f32>(limited(x[at]), limited(x[at + 1u])));
}
