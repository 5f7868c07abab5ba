// ORPO's loss (train/objectives/orpo.py): the negative log-likelihood of the chosen row, minus beta times the
// log-sigmoid of the log odds ratio z = log(p / (1 - p)) - log(q / (1 - q)), with p and q the answers' mean probabilities.
// 1 - p is at least LEAST, which keeps the slopes finite where an answer is certain.
const SIZE: u32 = 1u;
const STRIDE: u32 = 64u;
const BETA: f32 = 0.1;
const LEAST: f32 = 1e-7;

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
    if (g >= STRIDE || !in_use(g, 9u)) { return; }
    let m = members[g];
    let rate = 1.0 / vec2<f32>(max(m.yw - m.xz, vec2(1u)));
    let logps = min(rate * sums[g].xz, vec2(0.0));
    let rest = vec2(max(one_minus_exp(logps.x), LEAST), max(one_minus_exp(logps.y), LEAST)); // 1 - p, 1 - q
    let z = (logps.x - logps.y) - (log(rest.x) - log(rest.y));
    let nll = -shared_values[g] * sums[g].y;
    let ratio = log_sigmoid(z);
    let slope = -BETA * sigmoid(-z) / rest * vec2(1.0, -1.0) * rate;
    slopes[g] = group_weights[g] * vec4(slope.x, -shared_values[g], slope.y, 0.0);
    losses[g] = nll - BETA * ratio;
    log_pair(g, BETA * logps, logps);
    metrics[6u * STRIDE + g] = nll;
    metrics[7u * STRIDE + g] = ratio;
    metrics[8u * STRIDE + g] = z;
}
