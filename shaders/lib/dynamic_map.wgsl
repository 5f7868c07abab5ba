// The dynamic map of 8-bit optimizers (Dettmers et al. 2022), as in bitsandbytes. Between 0 and 1 it has seven decades; decade
// i is divided into 2^(i + E) cells, and their middles are its values. E is 0 for codes with a sign, 1 for those without.
// A magnitude is numbered n = 2^(i + E) + cell; 2^(7 + E) is 1, and E is 0.

// 10^(i - 6)
fn power_of_ten(i: vec4<i32>) -> vec4<f32> {
    let down = vec4<i32>(6) - i;
    let first = select(vec4<f32>(1.0), vec4<f32>(0.1), (down & vec4<i32>(1)) != vec4<i32>());
    let second = select(vec4<f32>(1.0), vec4<f32>(0.01), (down & vec4<i32>(2)) != vec4<i32>());
    return first * second * select(vec4<f32>(1.0), vec4<f32>(0.0001), (down & vec4<i32>(4)) != vec4<i32>());
}

fn magnitude(n: vec4<u32>, e: u32) -> vec4<f32> {
    let top = firstLeadingBit(max(n, vec4<u32>(1u)));
    let cells = vec4<f32>(vec4<u32>(1u) << top);
    let middle = 0.1 + 0.9 * (vec4<f32>(n) - cells + 0.5) / cells;
    let inside = power_of_ten(vec4<i32>(top) - i32(e)) * middle;
    let ends = select(inside, vec4<f32>(1.0), top == vec4<u32>(7u + e));
    return select(ends, vec4<f32>(), n == vec4<u32>(e));
}

// The number of the magnitude nearest to x, from 0 to 1.
fn nearest(x: vec4<f32>, e: u32) -> vec4<u32> {
    let b = f32(1u << e);
    let one = vec4<i32>(1);
    // Borders between decades are half-way between the last value of one and the first of the next.
    var i = vec4<i32>(-1);
    i += select(vec4<i32>(), one, x > vec4<f32>(0.5e-6 * (0.1 + 0.45 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-6 * (1.0 + 0.9 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-5 * (1.0 + 0.45 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-4 * (1.0 + 0.225 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-3 * (1.0 + 0.1125 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-2 * (1.0 + 0.05625 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1e-1 * (1.0 + 0.028125 / b)));
    i += select(vec4<i32>(), one, x > vec4<f32>(1.0 - 0.225 / (64.0 * b)));
    let cells = vec4<u32>(1u) << vec4<u32>(clamp(i, vec4<i32>(), vec4<i32>(6)) + i32(e));
    let place = (x / power_of_ten(clamp(i, vec4<i32>(), vec4<i32>(6))) - 0.1) / 0.9 * vec4<f32>(cells);
    let cell = min(vec4<u32>(max(place, vec4<f32>())), cells - 1u);
    let known = select(cells + cell, vec4<u32>(128u << e), i == vec4<i32>(7));
    return select(known, vec4<u32>(e), i == vec4<i32>(-1));
}

fn bytes(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}

fn joined(codes: vec4<u32>) -> u32 {
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

// Codes with a sign: 127 is 0, and 255 is 1.
fn signed_values(word: u32, scale: f32) -> vec4<f32> {
    let offset = vec4<i32>(bytes(word)) - 127;
    let size = magnitude(vec4<u32>(abs(offset)), 0u) * scale;
    return select(size, -size, offset < vec4<i32>());
}

fn signed_codes(x: vec4<f32>, scale: f32) -> u32 {
    let n = vec4<i32>(nearest(abs(x) / max(scale, 1e-38), 0u));
    return joined(vec4<u32>(127 + select(n, -min(n, vec4<i32>(127)), x < vec4<f32>())));
}

// Codes without a sign: 0 is 0, and 255 is 1.
fn unsigned_values(word: u32, scale: f32) -> vec4<f32> {
    return magnitude(bytes(word) + 1u, 1u) * scale;
}

fn unsigned_codes(x: vec4<f32>, scale: f32) -> u32 {
    return joined(nearest(x / max(scale, 1e-38), 1u) - 1u);
}
