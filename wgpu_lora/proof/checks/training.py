"""3. Fine-tuning and evaluating at the same time. 4. The losses that they report fall."""

from __future__ import annotations

import math
import statistics

import numpy as np

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.words import counted

SAME_LOSS = 1e-3  # relative, on two devices, which may round a weight between two NF4 codes differently
FALL = 0.05  # by which share losses have to fall
DEVIATIONS = 3  # of the difference of two means, from the scatter of the last tenth
FEWEST = 20  # steps, so that a tenth is more than one


def training_beside_evaluating(proof: Proof, finding: Finding) -> str:
    """Passes if both ended well and, with two devices, steps were taken while an evaluation computed."""
    training = proof.training()
    first, last = training.devices[0], training.devices[-1]
    before, steps = float(training.before["loss"]), max((done.steps for done in training.beside), default=0)
    seconds = training.record.state.seconds if training.record else 0.0
    finding.figures = {
        "devices": training.devices,
        "finetune": {"exit_code": training.code, "seconds": seconds, "steps": len(training.log)},
        "evaluations": [vars(done) for done in training.beside],
        "before": training.before,
        "loss_tolerance": SAME_LOSS,
        "at_the_same_time": first != last,
        "steps_while_evaluating": steps,
    }
    finding.expect(not training.code, f"finetune ended with exit code {training.code}: {training.said}")
    finding.expect(training.beside, "evaluate never ran")
    finding.faults += [done.failed for done in training.beside if done.failed]
    ran = [done.result for done in training.beside if not done.failed]
    losses = np.array([result["loss"] for result in ran], float)  # null becomes NaN
    apart = np.abs(losses - before) / max(abs(before), 1e-9)
    for loss, share in zip(losses, apart, strict=True):
        fault = f"evaluate's loss is {loss:.6f}, but {before:.6f} was measured before training"
        finding.expect(share <= SAME_LOSS, fault)
    for index, result in ((first, training.before), *((last, result) for result in ran)):
        finding.expect_device(index, proof.device(index), "evaluate", result["device"])
    if first != last and not steps:
        raise NotRun("training was over before an evaluation had begun to compute: give a recipe with more steps")
    if finding.faults:
        return ""
    worst = int(apart.argmax())
    beside = f"{steps} of them while evaluate ran on device {last}"
    if first == last:
        beside = "evaluate ran afterwards on the same device, since no other is used"
    return (
        f"{counted(len(training.log), 'step')} took {seconds:.0f} s on device {first}; {beside} "
        f"({ran[worst]['device']['name']} by its own account); its loss {losses[worst]:.6f} is within "
        f"{apart[worst]:.0e} (allowed {SAME_LOSS:.0e}) of the {before:.6f} measured on device {first} before training "
        "with the same model, adapter and data"
    )


def losses_fall(proof: Proof, finding: Finding) -> str:
    """Passes if the log has a finite loss of every step, and training and held-out loss fell by the margins."""
    training = proof.training()
    finding.figures["losses"] = losses = [line["loss"] for line in training.log]
    stopped, taken = "no run.json", len(losses)
    if training.record:
        stopped, taken = training.record.stop_reason, training.record.state.step
    fault = f"training stopped after {counted(len(losses), 'step')}: {training.said}"
    finding.expect(stopped not in ("non-finite", "diverged"), fault)
    # Lines with other values than finite numbers count as damaged, and are not read.
    fault = f"the log has finite numbers for {len(losses)} of {counted(taken, 'step')} only"
    finding.expect([line["step"] for line in training.log] == list(range(1, taken + 1)), fault)
    if finding.faults:
        return ""
    if training.code:
        raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
    if len(losses) < FEWEST:
        raise NotRun(f"{counted(len(losses), 'step')} are too few: give a recipe with {FEWEST} or more")
    seen, count = proof.seen_rows
    name = "the loss of eval_data" if seen else "the held-out loss"
    tenth = len(losses) // 10
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    margin = max(FALL * first, DEVIATIONS * statistics.stdev(losses[-tenth:]) * math.sqrt(2 / tenth))
    before = float(training.before["loss"])
    heldout = [(0, before), *((line["step"], line["eval_loss"]) for line in training.log if "eval_loss" in line)]
    after = heldout[-1][1] if heldout[1:] else math.nan
    finding.figures |= {"first_tenth": first, "last_tenth": last, "margin": margin, "heldout": heldout}
    finding.figures |= {"heldout_margin": FALL * before, "seen_in_training": seen}
    fault = f"the loss went from {first:.4f} to {last:.4f}: it had to fall by more than {margin:.4f}"
    finding.expect(first - last > margin, fault)
    fault = f"{name} went from {before:.4f} to {after:.4f}: it had to fall by {FALL * before:.4f}"
    finding.expect(before - after > FALL * before, fault)
    fallen = (
        f"{len(losses)} finite losses; first tenth {first:.4f}, last tenth {last:.4f} (margin {margin:.4f}); "
        f"{name} {before:.4f} to {after:.4f}"
    )
    if seen:
        raise NotRun(f"{seen} of the {count} rows of eval_data are training rows too, so no loss is held out; {fallen}")
    return fallen
