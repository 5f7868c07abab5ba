"""8. The trained program's gradients are its loss's. 9. Its run resumes to the same bytes."""

from __future__ import annotations

import json
import shutil

import numpy as np

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun, finite_or_nan
from wgpu_lora.proof.training import finetune_options
from wgpu_lora.train import checkpoint
from wgpu_lora.train.output import LOG, read_log

# Of one direction: a share of the difference, beside what f32's rounding leaves of one that is extrapolated.
OF_ONE, EXTRAPOLATED = 0.03, 3
OF_ALL = 0.015  # of the vector of all directions
BENT = 0.25  # of the directions, along which the loss may bend too much to say
LOGGED = ("step", "loss", "eval_loss", "learning_rate", "grad_norm")  # of a line of the log: all but times


def gradients_agree(proof: Proof) -> Finding:
    """Passes where the recorded gradient gives every measured difference of the loss, within f32's rounding."""
    if proof.args.compute_dtype != "f32":
        raise NotRun(f"activations are rounded to {proof.args.compute_dtype}: finite differences need f32")
    training = proof.trained()
    found = proof.children.run(
        "gradients", "proof-gradients", directory=str(training.directory), device=training.devices[0]
    )
    rows = [row for row in found["directions"] if row["measured"] is not None]
    bent = len(found["directions"]) - len(rows)
    measured = np.array([row["measured"] for row in rows])
    gradient = np.array([finite_or_nan(row["gradient"]) for row in rows])
    figures = {
        **found,
        "tolerance": {"of_one": OF_ONE, "of_the_loss": EXTRAPOLATED * found["rounding"], "of_all": OF_ALL},
    }
    if bent > BENT * len(found["directions"]):
        return Finding.of(
            [f"the loss bends too much along {bent} of {len(found['directions'])} directions"], "", figures
        )
    if not gradient.any():
        return Finding.of(["every gradient is zero"], "", figures)
    allowed = OF_ONE * np.abs(gradient) + EXTRAPOLATED * found["rounding"] * abs(finite_or_nan(found["loss"]))
    off = np.abs(measured - gradient) > allowed
    off |= ~np.isfinite(measured) | ~np.isfinite(gradient)
    together = float(np.linalg.norm(measured - gradient) / np.linalg.norm(gradient))
    faults = [
        f"along {row['matrix']} the loss moves by {row['measured']:.3e}, not {slope:.3e}"
        for row, slope, wrong in zip(rows, gradient, off, strict=True)
        if wrong
    ]
    if not together <= OF_ALL:
        faults.append(f"the gradients are off by {together:.1%} in all, more than {OF_ALL:.1%}")
    reason = (
        f"central differences in random directions of {len(rows)} matrices agree within {together:.2%} in all "
        f"(allowed {OF_ALL:.1%}), each within {OF_ONE:.0%} and f32's rounding"
        + (f"; {bent} more bend too much" if bent else "")
    )
    return Finding.of(faults, reason, {**figures, "together": together})


def resuming_is_exact(proof: Proof) -> Finding:
    """Continues the run from a checkpoint, in a new process and directory, and compares what both came to."""
    training = proof.trained()
    saved = checkpoint.found(training.directory / checkpoint.STEPS)
    earlier = [(step, path) for step, path in saved if step < len(training.log)]
    if not earlier or saved[-1][0] != len(training.log):
        raise NotRun("the run kept no checkpoint before its last step: give a recipe with smaller save_steps")
    (step, kept), (final_step, final) = earlier[-1], saved[-1]
    resumed = proof.out / "resumed"
    shutil.copytree(kept, resumed / checkpoint.STEPS / kept.name)
    # No later line, so that what is compared was written by this run.
    (resumed / LOG).write_text("".join(json.dumps(line) + "\n" for line in training.log if line["step"] <= step))
    options = finetune_options(proof.recipe, proof.args, resumed, training.devices[0])
    proof.children.run("resume", "finetune", **options, resume=True)
    again = resumed / checkpoint.STEPS / final.name
    parts = ("adapter_model.safetensors", checkpoint.OPTIMIZER)
    same = {name: (final / name).read_bytes() == (again / name).read_bytes() for name in parts}
    moved = (final / parts[0]).read_bytes() != (kept / parts[0]).read_bytes()
    logs = [[{k: line.get(k) for k in LOGGED} for line in log] for log in (training.log, read_log(resumed / LOG))]
    faults = [f"{name} differs after resuming" for name, equal in same.items() if not equal]
    if logs[0] != logs[1]:
        faults.append("the losses, rates or gradient norms of the log differ after resuming")
    if not moved:
        faults.append(f"no step after {step} changed the adapter, so that resuming shows nothing")
    carried = sum(line["step"] <= step for line in training.log)
    figures = {
        "compared": [*parts, *(f"{LOG}: {name}" for name in LOGGED)],
        "from_step": step,
        "to_step": final_step,
        "same": same,
        "same_log": logs[0] == logs[1],
    }
    reason = (
        f"resumed from step {step}, step {final_step} is the same: adapter and moments byte for byte; "
        f"losses, rates and gradient norms of the log's {len(logs[0])} lines, of which {len(logs[0]) - carried} are new"
    )
    return Finding.of(faults, reason, figures)
