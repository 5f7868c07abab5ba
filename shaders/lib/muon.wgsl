// A factor of a slot: home[0] = (owner, number, first value, stride between its `rank` vectors),
// home[1] = (stride within a vector, length of a vector, rank of the slot, 0). Of A, the vectors are rows; of B, columns.
struct Home { owner: u32, number: u32, first: u32, apart: u32, step: u32, length: u32, rank: u32, unused: u32 }

// Nesterov's direction, or that of plain momentum.
fn momentum_of(h: Hyper, old: vec4<f32>, g: vec4<f32>) -> vec4<f32> {
    return mix(old, g, vec4<f32>(h.rest));
}

fn direction_of(h: Hyper, old: vec4<f32>, g: vec4<f32>) -> vec4<f32> {
    let m = momentum_of(h, old, g);
    return select(m, mix(g, m, vec4<f32>(h.momentum)), h.nesterov != 0.0);
}
