// 1 + 3/4096 is nearer to 1 + 1/1024 (0x3c01) than to 1 (0x3c00), where RADV's pack2x16float truncates to.
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(1)
fn main() {
    y[0] = pack2x16float(vec2<f32>(1.0 + bitcast<f32>(y[1]), 0.0));
}
