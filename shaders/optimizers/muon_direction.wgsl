// direction = g + momentum (m' - g), with Nesterov's momentum, or m', where m' = m + (1 - momentum) (g - m) and g is the
// clipped gradient; 0 for slots that take no step.
const SIZE: u32 = 1024u;

@group(0) @binding(0) var<storage, read_write> grads: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> momentum: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> block_owners: array<u32>;
@group(0) @binding(3) var<storage, read> hyper: array<Hyper>;
@group(0) @binding(4) var<storage, read_write> report: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> direction: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE / 4u) { return; }
    let owner = block_owners[i / 256u];
    var found = vec4<f32>();
    if (owner != 0xffffffffu) {
        let slot = report[owner / 2u];
        if (slot.z != 0.0) { found = direction_of(hyper[owner], momentum[i], grads[i] * slot.y); }
    }
    direction[i] = found;
}
