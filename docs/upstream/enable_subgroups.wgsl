enable subgroups; // required by WGSL and Tint; Naga refuses the directive, so one text does not suit both
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) local: u32) {
    y[local] = subgroupAdd(local);
}
