// `var` in a loop body must be zero again in every iteration (WGSL, "variable declaration"): y is 1, 1, 1, 1.
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(1)
fn main() {
    for (var i = 0u; i < 4u; i++) {
        var count: array<u32, 4>;
        count[i & 1u] += 1u;
        y[i] = count[0] + count[1];
    }
}
