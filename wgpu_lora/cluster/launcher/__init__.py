"""`wgpu-lora cluster up` and `down`: Ray started on hosts by its own launcher, over SSH, and the way there."""
