// Lion (Chen et al. 2023): p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
fn moved(h: Hyper, old: Values, g: vec4<f32>) -> Values {
    let direction = sign(fma(vec4<f32>(h.beta1), old.first, h.rest1 * g));
    let p = old.params * (1.0 - h.learning_rate * h.weight_decay) - h.learning_rate * direction;
    return Values(p, fma(vec4<f32>(h.beta2), old.first, h.rest2 * g), vec4<f32>());
}
