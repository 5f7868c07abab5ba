// AdamW (Loshchilov and Hutter 2019) with the clipped gradient g = grad * factor, for the slots that may be updated:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p = p (1 - lr wd) - lr (m / c1) / (sqrt(v / c2) + eps), with c = 1 - b^step
// The gradient of all slots is zeroed for the next step. A thread updates four values of one slot.
const SIZE: u32 = 1024u;

@group(0) @binding(0) var<storage, read_write> params: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> grads: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> first_moment: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> second_moment: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> block_slots: array<u32>;
@group(0) @binding(5) var<storage, read> hyper: array<Hyper>;
@group(0) @binding(6) var<storage, read_write> report: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE / 4u) { return; }
    let slot = block_slots[i / 256u];
    if (slot == 0xffffffffu) { return; }
    let h = hyper[slot];
    let g = grads[i] * report[slot].y;
    grads[i] = vec4<f32>();
    if (report[slot].z == 0.0) { return; }
    let m = new_first_moment(h, first_moment[i], g);
    let v = new_second_moment(h, second_moment[i], g);
    first_moment[i] = m;
    second_moment[i] = v;
    params[i] = new_params(h, params[i], m, v);
}
