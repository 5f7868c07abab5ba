"""Training on several machines: what a WebGPU device is to Ray, how much fits it, and which adapter goes where."""
