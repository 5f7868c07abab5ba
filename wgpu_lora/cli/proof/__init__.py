"""`wgpu-lora prove`: training and inference on wgpu alone, shown on the machine it runs on by child processes."""
