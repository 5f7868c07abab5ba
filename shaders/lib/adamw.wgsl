// A slot's hyper-parameters of one step; rest is 1 - beta, taken in float64: 1 - 0.999 in f32 is off in the fifth digit.
struct Hyper { learning_rate: f32, beta1: f32, beta2: f32, eps: f32, weight_decay: f32, correction1: f32,
               correction2: f32, max_grad_norm: f32, enabled: f32, rest1: f32, rest2: f32, unused: f32 }

fn new_first_moment(h: Hyper, moment: vec4<f32>, g: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(h.beta1), moment, h.rest1 * g);
}

fn new_second_moment(h: Hyper, moment: vec4<f32>, g: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(h.beta2), moment, h.rest2 * g * g);
}

fn new_params(h: Hyper, params: vec4<f32>, m: vec4<f32>, v: vec4<f32>) -> vec4<f32> {
    let decayed = params * (1.0 - h.learning_rate * h.weight_decay);
    return decayed - h.learning_rate * (m / h.correction1) / (sqrt(v / h.correction2) + h.eps);
}
