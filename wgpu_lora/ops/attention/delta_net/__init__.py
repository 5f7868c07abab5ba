"""The gated delta rule of Qwen3.5, as WGSL kernels."""
