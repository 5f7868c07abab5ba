// The index of an invocation in a linear grid of workgroups of 64, folded after 32768 of them (LINEAR_X in gpu/kernel.py).
fn linear_index(group: vec3<u32>, local: u32) -> u32 {
    return (group.y * 32768u + group.x) * 64u + local;
}
