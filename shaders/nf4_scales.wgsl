// scales[b] = dynamic[code of b] * nested[b / 256] + offset: the constants of a double-quantised NF4 tensor.
// The offset is the last entry of `nested`.
const BLOCKS: u32 = 4u;

@group(0) @binding(0) var<storage, read> absmax_codes: array<u32>;
@group(0) @binding(1) var<storage, read> nested: array<f32>;
@group(0) @binding(2) var<storage, read> dynamic: array<f32>;
@group(0) @binding(3) var<storage, read_write> scales: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let b = linear_index(group, local);
    if (b >= BLOCKS) { return; }
    let code = (absmax_codes[b / 4u] >> ((b & 3u) * 8u)) & 255u;
    scales[b] = dynamic[code] * nested[b / 256u] + nested[(BLOCKS + 255u) / 256u];
}
