// SGD as in PyTorch, whose weight decay is part of the gradient: d = g + wd p;  m = momentum m + d
//   p = p - lr m, or with Nesterov's momentum p - lr (d + momentum m)
fn moved(h: Hyper, old: Values, g: vec4<f32>) -> Values {
    let d = fma(vec4<f32>(h.weight_decay), old.params, g);
    let m = fma(vec4<f32>(h.momentum), old.first, d);
    let step = select(m, fma(vec4<f32>(h.momentum), m, d), h.nesterov != 0.0);
    return Values(old.params - h.learning_rate * step, m, vec4<f32>());
}
