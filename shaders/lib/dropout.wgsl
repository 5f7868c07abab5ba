// PCG's output permutation (O'Neill 2014), as a hash.
fn pcg(v: u32) -> u32 {
    let state = v * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

// x keep / (1 - p): draw = (key, key, p * 2^32, bits of 1 / (1 - p)).
fn dropped_value(x: f32, draw: vec4<u32>, key: u32, column: u32) -> f32 {
    let random = pcg(draw.x ^ pcg(draw.y ^ pcg(key ^ pcg(column))));
    return select(0.0, x * bitcast<f32>(draw.w), random >= draw.z);
}
