// What losses of pairs have in common. Their files declare SIZE, STRIDE, group_weights, slopes, losses and metrics.

// Whether group g is in use. If not, its results are zeros, of `count` metrics.
fn in_use(g: u32, count: u32) -> bool {
    if (g < SIZE && group_weights[min(g, SIZE - 1u)] != 0.0) { return true; }
    if (g < SIZE) {
        slopes[g] = vec4(0.0);
        losses[g] = 0.0;
    }
    for (var i = 0u; i < count; i++) { metrics[i * STRIDE + g] = 0.0; }
    return false;
}

// The first six metrics, from the rewards and the log-probabilities of the chosen and the rejected answer.
fn log_pair(g: u32, rewards: vec2<f32>, logps: vec2<f32>) {
    metrics[g] = rewards.x;
    metrics[STRIDE + g] = rewards.y;
    metrics[2u * STRIDE + g] = select(0.0, 1.0, rewards.x > rewards.y);
    metrics[3u * STRIDE + g] = rewards.x - rewards.y;
    metrics[4u * STRIDE + g] = logps.x;
    metrics[5u * STRIDE + g] = logps.y;
}
