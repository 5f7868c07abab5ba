// AdamW (Loshchilov and Hutter 2019):
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p = p (1 - lr wd) - lr (m / c1) / (sqrt(v / c2) + eps), with c = 1 - b^step
fn moved(h: Hyper, old: Values, g: vec4<f32>) -> Values {
    let m = fma(vec4<f32>(h.beta1), old.first, h.rest1 * g);
    let v = fma(vec4<f32>(h.beta2), old.second, h.rest2 * g * g);
    let decayed = old.params * (1.0 - h.learning_rate * h.weight_decay);
    let p = decayed - h.learning_rate * (m / h.correction1) / (sqrt(v / h.correction2) + h.eps);
    return Values(p, m, v);
}
