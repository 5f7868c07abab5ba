// y = x rounded to f16, to the nearest and of two equally near to the even one, if enabled[0] is 1, else x.
// In integers, since `pack2x16float` may round either way.
const SIZE: u32 = 64u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> enabled: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

fn nearest_f16(v: f32) -> f32 {
    let bits = bitcast<u32>(v);
    let size = bits & 0x7fffffffu;
    if (size >= 0x477fe000u) { // 65504, the largest; also what is not finite, which the update never lets through
        return bitcast<f32>((bits & 0x80000000u) | 0x477fe000u);
    }
    if (size < 0x38800000u) { // below 2^-14, f16 has steps of 2^-24
        return round(v * 16777216.0) * 5.9604644775390625e-8;
    }
    return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let v = x[i];
    if (enabled[0] == 1u) { y[i] = nearest_f16(v); } else { y[i] = v; }
}
