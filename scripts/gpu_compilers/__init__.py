"""What GPU drivers' compilers make of the kernels, without a GPU: registers, spills, occupancy, instructions.

Mesa's drm shims make a driver believe that a GPU is there. Its real compiler then compiles every compute pipeline; no
dispatch does anything. `make gpu-compilers` shows the options.
"""
