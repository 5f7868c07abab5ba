// AdamW's new moments and parameters, given a slot's Hyper (train/optimizers/adamw.py).
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
