"""5. Training ran on the named device. 8. Gradients are those of the loss. 9. Resuming is exact."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import numpy as np

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import FACTS, Finding, NotRun
from wgpu_lora.proof.training import finetune_options
from wgpu_lora.train import checkpoint
from wgpu_lora.train.output import LOG, read_log

SAME_LOSS = 1e-5  # relative; the same program on the same device gives the same bits
SKEW = 0.02  # by which the device's clock may run faster than the host's
# Tolerances: of one direction, a share of the difference plus f32's rounding, extrapolated; of the vector of all.
OF_ONE, EXTRAPOLATED, OF_ALL = 0.03, 3, 0.015
BENT = 0.25  # of the directions, along which the loss may be too curved to compare
LOGGED = ("step", "loss", "eval_loss", "learning_rate", "grad_norm")  # of a line of the log: all but times


def work_happened_on_the_device(proof: Proof, finding: Finding) -> str:
    """Passes if run.json names the listed device and the first step, repeated there, gives the logged loss."""
    training = proof.trained()
    assert training.record
    index, said = training.devices[0], asdict(training.record.environment.device)
    facts = (*FACTS, "kind")
    clock = proof.children.run("clock", "proof-clock", directory=str(training.directory), device=index)
    logged, loss = training.log[0]["loss"], float(np.float64(clock["loss"]))  # null becomes NaN
    share = clock["device_seconds"] / clock["host_seconds"]
    finding.figures = {
        "device": {name: said[name] for name in facts},
        "clock": clock,
        "share": share,
        "logged_loss": logged,
    }
    finding.expect_device(index, proof.device(index), "run.json", said, facts)
    fault = f"the timed step's loss is {loss:.7f}, but the run logged {logged:.7f}"
    finding.expect(abs(loss - logged) <= SAME_LOSS * abs(logged), fault)
    finding.expect(clock["dispatches"], "no kernel was dispatched")
    by = "the device has no timestamps, so only the dispatches were counted"
    if clock["clock"] == "timestamps":
        by = f"the device's timestamps account for {clock['device_seconds']:.4f} s, {share:.0%} of the step's time"
        fault = f"the device's timestamps account for {share:.0%} of the step's time on the host, which is impossible"
        finding.expect(0 < share <= 1 + SKEW, fault)
    return (
        f"{said['name']}, {said['driver']}, {said['backend']}; the first step, repeated afterwards in "
        f"{clock['dispatches']} dispatches, has the logged loss, {logged:.6f}; {by}"
    )


def gradients_agree(proof: Proof, finding: Finding) -> str:
    """Passes if the recorded gradient predicts every measured difference of the loss, within f32's rounding."""
    if proof.args.compute_dtype != "f32":
        raise NotRun(f"activations are rounded to {proof.args.compute_dtype}: finite differences need f32")
    training = proof.trained()
    where = {"directory": str(training.directory), "device": training.devices[0]}
    found = proof.children.run("gradients", "proof-gradients", **where)
    rounding = EXTRAPOLATED * found["rounding"]
    tolerance = {"of_one": OF_ONE, "of_the_loss": rounding, "of_all": OF_ALL}
    finding.figures = {**found, "tolerance": tolerance}
    count, rows = len(found["directions"]), [row for row in found["directions"] if row["length"] is not None]
    bent = count - len(rows)
    finding.expect(bent <= BENT * count, f"the loss is too curved along {bent} of {count} directions")
    # Null becomes NaN.
    measured, gradient = (np.array([row[name] for row in rows], float) for name in ("measured", "gradient"))
    finding.expect(gradient.any(), "every gradient is zero")
    allowed = OF_ONE * np.abs(gradient) + rounding * abs(np.float64(found["loss"]))
    for row, moved, slope, most in zip(rows, measured, gradient, allowed, strict=True):
        fault = f"along {row['matrix']} the loss changes by {moved:.3e}, but the gradient predicts {slope:.3e}"
        finding.expect(abs(moved - slope) <= most, fault)
    together = float(np.linalg.norm(measured - gradient) / (np.linalg.norm(gradient) or 1))
    finding.figures["together"] = together
    finding.expect(together <= OF_ALL, f"the gradients differ by {together:.1%} overall, more than {OF_ALL:.1%}")
    return (
        f"central differences in random directions of {len(rows)} matrices agree within {together:.2%} overall "
        f"(allowed {OF_ALL:.1%}), each within {OF_ONE:.0%} and f32's rounding"
        + (f"; the loss is too curved along {bent} more" if bent else "")
    )


def resuming_is_exact(proof: Proof, finding: Finding) -> str:
    """Continues the run from a checkpoint, in a new process and directory, and compares the results of both."""
    training = proof.trained()
    log, saved = training.log, checkpoint.found(training.directory / checkpoint.STEPS)
    if len(saved) < 2 or saved[-1][0] != len(log):
        raise NotRun("the run kept no checkpoint before its last step: give a recipe with smaller save_steps")
    (step, kept), (final_step, final) = saved[-2:]
    resumed = proof.out / "resumed"
    shutil.copytree(kept, resumed / checkpoint.STEPS / kept.name)
    # Without later lines, so that those compared were written by the resumed run.
    carried = [line for line in log if line["step"] <= step]
    (resumed / LOG).write_text("".join(json.dumps(line) + "\n" for line in carried))
    options = finetune_options(proof.recipe, proof.args, resumed, training.devices[0])
    proof.children.run("resume", "finetune", **options, resume=True)
    again = resumed / checkpoint.STEPS / final.name
    parts = ("adapter_model.safetensors", checkpoint.OPTIMIZER)
    same = {name: (final / name).read_bytes() == (again / name).read_bytes() for name in parts}
    first, second = ([[line.get(key) for key in LOGGED] for line in lines] for lines in (log, read_log(resumed / LOG)))
    finding.figures = {
        "compared": [*parts, *(f"{LOG}: {name}" for name in LOGGED)],
        "from_step": step,
        "to_step": final_step,
        "same": same,
        "same_log": first == second,
    }
    for name, equal in same.items():
        finding.expect(equal, f"{name} differs after resuming")
    finding.expect(first == second, "the losses, rates or gradient norms of the log differ after resuming")
    moved = (final / parts[0]).read_bytes() != (kept / parts[0]).read_bytes()
    finding.expect(moved, f"no step after {step} changed the adapter, so resuming shows nothing")
    return (
        f"resumed from step {step}, step {final_step} is the same: adapter and moments byte for byte; "
        f"losses, rates and gradient norms in the log's {len(log)} lines, of which {len(log) - len(carried)} are new"
    )
