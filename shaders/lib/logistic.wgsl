// The logistic function and its logarithm, for any x: nothing overflows, and small results keep their digits.

// log(1 + e) for 0 <= e <= 1
fn log_1p(e: f32) -> f32 {
    return select(log(1.0 + e), e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * (0.2 - e / 6.0))))), e < 0.05);
}

// log(1 / (1 + exp(-x)))
fn log_sigmoid(x: f32) -> f32 {
    return min(x, 0.0) - log_1p(exp(-abs(x)));
}

fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(e, 1.0, x >= 0.0) / (1.0 + e);
}

// 1 - exp(x) for x <= 0
fn one_minus_exp(x: f32) -> f32 {
    return select(1.0 - exp(x), -x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x / 120.0)))), x > -0.05);
}
