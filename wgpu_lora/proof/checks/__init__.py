"""The checks of a proof by number: each takes a Proof, notes figures and faults, and returns what it found if none."""

from __future__ import annotations

from collections.abc import Callable

from wgpu_lora.proof.checks.answers import answers_pass_their_checks
from wgpu_lora.proof.checks.cuda import no_cuda
from wgpu_lora.proof.checks.devices import devices_agree, devices_compute
from wgpu_lora.proof.checks.program import gradients_agree, resuming_is_exact, work_happened_on_the_device
from wgpu_lora.proof.checks.training import losses_fall, training_beside_evaluating
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding

CHECKS: dict[int, tuple[str, Callable[[Proof, Finding], str]]] = {
    1: ("devices", devices_compute),
    2: ("import and generate", devices_agree),
    3: ("finetune, evaluate", training_beside_evaluating),
    4: ("losses fall", losses_fall),
    5: ("backend", work_happened_on_the_device),
    6: ("no CUDA", no_cuda),
    7: ("answers", answers_pass_their_checks),
    8: ("gradients", gradients_agree),
    9: ("resume", resuming_is_exact),
}
FIRST = 1  # the devices
ANSWERS = 7  # runs code that a model wrote
LAST = 6  # watches all the others
