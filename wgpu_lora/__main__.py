"""`python -m wgpu_lora`, the same as `wgpu-lora`."""

from wgpu_lora.entry import main

if __name__ == "__main__":
    main()
