// Eight neighbours of a row.
struct Octet { low: vec4<f32>, high: vec4<f32> }
// W[out, size_in], and where its codes, or values, and its scales begin. The rows of a table may be a range of its rows.
struct Matrix { codes: u32, scales: u32, out: u32, size_in: u32 }
