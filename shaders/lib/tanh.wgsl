// tanh(x) to a few units in the last place: drivers compute it from exponentials, which cancel near 0.
fn accurate_tanh(x: f32) -> f32 {
    let s = x * x;
    let small = x * (1.0 + s * (-0.33333333 + s * (0.13333333 + s * (-0.053968254 + s * 0.021869488))));
    let e = exp(-2.0 * min(abs(x), 20.0));
    return select(sign(x) * (1.0 - e) / (1.0 + e), small, abs(x) < 0.25);
}
