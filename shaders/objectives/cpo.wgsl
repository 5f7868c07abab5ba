// CPO's losses (train/objectives/cpo.py), of which one weight is 1: sigmoid, hinge, ipo or simpo, the last two of mean
// log-probabilities, plus cpo_alpha times the negative log-likelihood of the chosen answer.
const SIZE: u32 = 1u;
const STRIDE: u32 = 64u;
const BETA: f32 = 0.1;
const LABEL_SMOOTHING: f32 = 0.0;
const GAMMA: f32 = 0.5;
const ALPHA: f32 = 1.0;
const MEAN: bool = false;
const HINGE: bool = false;
const IPO: bool = false;
const SIMPO: bool = false;

@group(0) @binding(0) var<storage, read_write> sums: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> members: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> group_weights: array<f32>;
@group(0) @binding(3) var<storage, read> shared_values: array<f32>;
@group(0) @binding(4) var<storage, read_write> slopes: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> losses: array<f32>;
@group(0) @binding(6) var<storage, read_write> metrics: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let g = linear_index(group, local);
    if (g >= STRIDE || !in_use(g, 7u)) { return; }
    let m = members[g];
    let rate = select(vec2(1.0), 1.0 / vec2<f32>(max(m.yw - m.xz, vec2(1u))), MEAN);
    let logps = rate * sums[g].xz;
    let h = BETA * (logps.x - logps.y) - select(0.0, GAMMA, SIMPO);
    var loss = -(1.0 - LABEL_SMOOTHING) * log_sigmoid(h) - LABEL_SMOOTHING * log_sigmoid(-h);
    var by_h = LABEL_SMOOTHING * sigmoid(h) - (1.0 - LABEL_SMOOTHING) * sigmoid(-h);
    if (HINGE) {
        loss = max(0.0, 1.0 - h);
        by_h = select(0.0, -1.0, h < 1.0);
    }
    if (IPO) {
        let e = logps.x - logps.y - 0.5 / BETA;
        loss = e * e;
        by_h = 2.0 * e / BETA;
    }
    let nll = -shared_values[g] * sums[g].y;
    let slope = BETA * by_h * rate;
    slopes[g] = group_weights[g] * vec4(slope.x, -ALPHA * shared_values[g], -slope.y, 0.0);
    losses[g] = loss + ALPHA * nll;
    log_pair(g, BETA * logps, logps);
    metrics[6u * STRIDE + g] = nll;
}
