"""`python -m wgpu_lora`, as `wgpu-lora`."""

import sys

from wgpu_lora.entry import main

if __name__ == "__main__":
    sys.exit(main())
