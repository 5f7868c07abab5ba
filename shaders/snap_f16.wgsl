// y = x rounded to f16, at most its largest value, if enabled[0] is 1, else x
const SIZE: u32 = 64u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> enabled: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let v = x[i];
    if (enabled[0] == 1u) { y[i] = nearest_f16(clamp(v, -65504.0, 65504.0)); } else { y[i] = v; }
}
