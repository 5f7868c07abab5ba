enable subgroups;
// The bound is the same in all lanes of a workgroup, since it depends on its number alone, but Tint sees a read_write buffer.
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    for (var i = 0u; i < y[group.x]; i++) {
        y[32u + local] += subgroupBroadcast(local, 3u);
    }
}
