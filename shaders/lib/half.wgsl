// Two 16-bit floats in a word, without the shader-f16 feature.
fn bf16_low(word: u32) -> f32 { return bitcast<f32>(word << 16u); }
fn bf16_high(word: u32) -> f32 { return bitcast<f32>(word & 0xffff0000u); }
fn f16_low(word: u32) -> f32 { return unpack2x16float(word).x; }
fn f16_high(word: u32) -> f32 { return unpack2x16float(word).y; }
