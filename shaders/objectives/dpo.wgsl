// A weighted sum of DPO's losses (train/objectives/dpo.py): the weight of each is a constant, 0 if it is not used.
// With c and r the log-ratios of the chosen and the rejected answer to the reference:
const SIZE: u32 = 1u;
const STRIDE: u32 = 64u;
const BETA: f32 = 0.1;
const LABEL_SMOOTHING: f32 = 0.0;
const SIGMOID: f32 = 1.0;
const HINGE: f32 = 0.0;
const IPO: f32 = 0.0;
const EXO_PAIR: f32 = 0.0;
const NCA_PAIR: f32 = 0.0;
const ROBUST: f32 = 0.0;
const SPPO_HARD: f32 = 0.0;
const APO_ZERO: f32 = 0.0;
const APO_DOWN: f32 = 0.0;
const SFT: f32 = 0.0;

@group(0) @binding(0) var<storage, read_write> sums: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> members: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> reference: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> group_weights: array<f32>;
@group(0) @binding(4) var<storage, read> shared_values: array<f32>;
@group(0) @binding(5) var<storage, read_write> slopes: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> losses: array<f32>;
@group(0) @binding(7) var<storage, read_write> metrics: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let g = linear_index(group, local);
    if (g >= STRIDE || !in_use(g, 6u)) { return; }
    let logps = sums[g].xz;
    let c = logps.x - reference[g].x;
    let r = logps.y - reference[g].y;
    let a = BETA * c;
    let b = BETA * r;
    let h = BETA * (c - r);
    var loss = 0.0;
    var slope = vec2(0.0); // by c and r
    var nll = 0.0; // by the sum of the chosen answer's plain log-probabilities
    if (SIGMOID != 0.0) {
        loss -= SIGMOID * log_sigmoid(h);
        slope += SIGMOID * BETA * sigmoid(-h) * vec2(-1.0, 1.0);
    }
    if (HINGE != 0.0) {
        loss += HINGE * max(0.0, 1.0 - h);
        slope += select(0.0, HINGE * BETA, h < 1.0) * vec2(-1.0, 1.0);
    }
    if (IPO != 0.0) {
        let m = members[g];
        let rate = 1.0 / vec2<f32>(max(m.yw - m.xz, vec2(1u)));
        let e = c * rate.x - r * rate.y - 0.5 / BETA;
        loss += IPO * e * e;
        slope += 2.0 * IPO * e * rate * vec2(1.0, -1.0);
    }
    if (EXO_PAIR != 0.0) {
        let win = sigmoid(h);
        let lose = sigmoid(-h);
        let log_win = log(1.0 - LABEL_SMOOTHING);
        let log_lose = log(max(LABEL_SMOOTHING, 1e-30));
        loss += EXO_PAIR * (win * (log_sigmoid(h) - log_win) + lose * (log_sigmoid(-h) - log_lose));
        slope += EXO_PAIR * BETA * win * lose * (h - log_win + log_lose) * vec2(1.0, -1.0);
    }
    if (NCA_PAIR != 0.0) {
        loss -= NCA_PAIR * (log_sigmoid(a) + 0.5 * log_sigmoid(-a) + 0.5 * log_sigmoid(-b));
        slope += NCA_PAIR * BETA * vec2(0.5 * sigmoid(a) - sigmoid(-a), 0.5 * sigmoid(b));
    }
    if (ROBUST != 0.0) {
        let scale = ROBUST / max(1.0 - 2.0 * LABEL_SMOOTHING, 1e-30);
        loss += scale * (LABEL_SMOOTHING * log_sigmoid(-h) - (1.0 - LABEL_SMOOTHING) * log_sigmoid(h));
        let by_h = -scale * ((1.0 - LABEL_SMOOTHING) * sigmoid(-h) + LABEL_SMOOTHING * sigmoid(h));
        slope += BETA * by_h * vec2(1.0, -1.0);
    }
    if (SPPO_HARD != 0.0) {
        let e = vec2(c - 0.5 / BETA, r + 0.5 / BETA);
        loss += SPPO_HARD * dot(e, e);
        slope += 2.0 * SPPO_HARD * e;
    }
    if (APO_ZERO != 0.0) {
        loss += APO_ZERO * (sigmoid(-a) + sigmoid(b));
        slope += APO_ZERO * BETA * vec2(-sigmoid(a) * sigmoid(-a), sigmoid(b) * sigmoid(-b));
    }
    if (APO_DOWN != 0.0) {
        let by_h = sigmoid(h) * sigmoid(-h);
        loss += APO_DOWN * (sigmoid(a) + sigmoid(-h));
        slope += APO_DOWN * BETA * vec2(sigmoid(a) * sigmoid(-a) - by_h, by_h);
    }
    if (SFT != 0.0) {
        nll = -SFT * shared_values[g];
        loss += nll * sums[g].y;
    }
    slopes[g] = group_weights[g] * vec4(slope.x, nll, slope.y, 0.0);
    losses[g] = loss;
    log_pair(g, vec2(a, b), logps);
}
