// scales[g] = max |w| / LEVELS over the GROUP values of group g, at least 2^-24
struct Dims { size: u32 }

const GROUP: u32 = 16u;
const LEVELS: f32 = 1.0;
const SMALLEST: f32 = 5.9604644775390625e-08; // 2^-24, the smallest positive f16

@group(0) @binding(0) var<storage, read> w: array<f32>;
@group(0) @binding(1) var<storage, read_write> scales: array<f32>;
@group(0) @binding(2) var<uniform> dims: Dims;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let index = linear_index(group, local);
    if (index >= dims.size) { return; }
    var top = 0.0;
    for (var i = index * GROUP; i < (index + 1u) * GROUP; i++) {
        top = max(top, abs(w[i]));
    }
    scales[index] = max(top / LEVELS, SMALLEST);
}
