// m = m + (1 - momentum) (g - m), of the slots that may be updated; the gradient of all slots is zeroed.
const SIZE: u32 = 1024u;

@group(0) @binding(0) var<storage, read_write> grads: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> momentum: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> block_owners: array<u32>;
@group(0) @binding(3) var<storage, read> hyper: array<Hyper>;
@group(0) @binding(4) var<storage, read_write> report: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE / 4u) { return; }
    let owner = block_owners[i / 256u];
    if (owner == 0xffffffffu) { return; }
    let slot = report[owner / 2u];
    let g = grads[i] * slot.y;
    grads[i] = vec4<f32>();
    if (slot.z != 0.0) { momentum[i] = momentum_of(hyper[owner], momentum[i], g); }
}
