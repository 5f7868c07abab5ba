// KTO's loss (train/objectives/kto.py): weight sigmoid(-beta (x - kl)) of a desirable answer, sigmoid(beta (x - kl)) of
// an undesirable one, with x the log-ratio to the reference; values > 0 are desirable, and shared_values are the KL term.
const SIZE: u32 = 1u;
const STRIDE: u32 = 64u;
const BETA: f32 = 0.1;
const DESIRABLE: f32 = 1.0;
const UNDESIRABLE: f32 = 1.0;

@group(0) @binding(0) var<storage, read_write> sums: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read> reference: array<f32>;
@group(0) @binding(2) var<storage, read> group_weights: array<f32>;
@group(0) @binding(3) var<storage, read> values: array<f32>;
@group(0) @binding(4) var<storage, read> shared_values: array<f32>;
@group(0) @binding(5) var<storage, read_write> slopes: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read_write> losses: array<f32>;
@group(0) @binding(7) var<storage, read_write> metrics: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let g = linear_index(group, local);
    if (g >= STRIDE) { return; }
    let used = g < SIZE && group_weights[min(g, SIZE - 1u)] != 0.0;
    for (var i = 0u; i < 7u; i++) { metrics[i * STRIDE + g] = 0.0; }
    if (!used) {
        if (g < SIZE) {
            slopes[g] = vec2(0.0);
            losses[g] = 0.0;
        }
        return;
    }
    let x = sums[g].x - reference[g];
    let good = values[g] > 0.0;
    let toward = select(1.0, -1.0, good);
    let weight = select(UNDESIRABLE, DESIRABLE, good);
    let h = toward * BETA * (x - shared_values[g]);
    losses[g] = weight * sigmoid(h);
    slopes[g] = vec2(group_weights[g] * weight * toward * BETA * sigmoid(h) * sigmoid(-h), 0.0);
    let first = select(1u, 0u, good); // of the metrics, in pairs: of the desirable, of the undesirable
    metrics[first * STRIDE + g] = BETA * x;
    metrics[(2u + first) * STRIDE + g] = sums[g].x;
    metrics[(4u + first) * STRIDE + g] = 1.0;
    metrics[6u * STRIDE + g] = shared_values[g];
}
