"""3. finetune and evaluate at the same time. 4. The losses that they report fall."""

from __future__ import annotations

import math
import statistics
from typing import Any

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.training import Training

FALL = 0.05  # by which share losses have to fall
DEVIATIONS = 3  # of the difference of two means, from the scatter of the last tenth
FEWEST = 20  # steps of which a tenth says something


def training_beside_evaluating(proof: Proof) -> Finding:
    """Passes where both commands ended well and, with two devices, steps were taken while an evaluation computed."""
    training = proof.training()
    ran = [done for done in training.beside if done.code == 0]
    steps = max((done.steps for done in ran), default=0)
    alone = len(training.devices) == 1
    figures: dict[str, Any] = {
        "devices": training.devices,
        "finetune": {"exit_code": training.code, "seconds": training.seconds, "steps": len(training.log)},
        "evaluations": [vars(done) for done in training.beside],
        "at_the_same_time": not alone,
        "steps_while_evaluating": steps,
    }
    faults = [f"evaluate ended with exit code {done.code}: {done.said}" for done in training.beside if done.code]
    if training.code:
        faults.insert(0, f"finetune ended with exit code {training.code}: {training.said}")
    if not ran and not faults:
        faults.append("evaluate never ran")
    if not faults and not alone and not steps:
        raise NotRun("training was over before an evaluation had begun to compute: give a recipe with more steps")
    trained = f"{len(training.log)} steps in {training.seconds:.0f} s on device {training.devices[0]}"
    if alone:
        return Finding.of(faults, f"{trained}; evaluate on the same device afterwards, since no other is used", figures)
    reason = f"{trained}; {steps} of them while evaluate computed on device {training.devices[1]}"
    return Finding.of(faults, reason, figures)


def losses_fall(proof: Proof) -> Finding:
    """Passes where every loss is finite and both the training loss and the held-out loss have fallen by the margins."""
    training = proof.training()
    losses = [line["loss"] for line in training.log]
    stopped = training.facts["stop_reason"] if training.facts else "no run.json"
    if stopped == "non-finite":
        return Finding.of([f"training stopped after {len(losses)} steps: {training.said}"], "", {"losses": losses})
    if not all(math.isfinite(line[key]) for line in training.log for key in ("loss", "grad_norm")):
        return Finding.of(["a loss or a gradient in the log is not finite"], "", {"losses": losses})
    if training.code:
        raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
    if len(losses) < FEWEST:
        raise NotRun(f"{len(losses)} steps are too few: give a recipe with {FEWEST} or more")
    return _fallen(training, losses)


def _fallen(training: Training, losses: list[float]) -> Finding:
    tenth = len(losses) // 10
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    margin = max(FALL * first, DEVIATIONS * statistics.stdev(losses[-tenth:]) * math.sqrt(2 / tenth))
    before = float(training.before["loss"])
    heldout = [(line["step"], line["eval_loss"]) for line in training.log if "eval_loss" in line]
    after = heldout[-1][1] if heldout else math.nan
    figures = {
        "losses": losses,
        "first_tenth": first,
        "last_tenth": last,
        "margin": margin,
        "heldout": [(0, before), *heldout],
        "heldout_margin": FALL * before,
    }
    faults = []
    if not first - last > margin:
        faults.append(f"the loss went from {first:.4f} to {last:.4f}: it had to fall by more than {margin:.4f}")
    if not before - after > FALL * before:
        faults.append(f"the held-out loss went from {before:.4f} to {after:.4f}: it had to fall by {FALL * before:.4f}")
    reason = (
        f"{len(losses)} finite losses; first tenth {first:.4f}, last tenth {last:.4f} (margin {margin:.4f}); "
        f"held-out {before:.4f} to {after:.4f}"
    )
    return Finding.of(faults, reason, figures)
