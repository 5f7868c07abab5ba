"""The WebGPU devices of a machine, as resources of a cluster: names, memory, speed, and what must agree with others."""
