"""3. finetune and evaluate at the same time. 4. The losses that they report fall."""

from __future__ import annotations

import math
import statistics
from typing import Any

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import NOT_RUN, PASSED, Finding, NotRun
from wgpu_lora.proof.training import Training
from wgpu_lora.words import counted

SAME_LOSS = 1e-3  # relative: of one model and one file on two devices, which may round an odd weight of NF4 differently
FACTS = ("name", "driver", "backend")
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
        "before": training.before,
        "loss_tolerance": SAME_LOSS,
        "at_the_same_time": not alone,
        "steps_while_evaluating": steps,
    }
    faults = [f"evaluate ended with exit code {done.code}: {done.said}" for done in training.beside if done.code]
    faults += [fault for done in ran for fault in _off(done.result, training, proof.adapter(training.devices[-1]))]
    faults += _elsewhere(training.before, proof.adapter(training.devices[0]))
    if training.code:
        faults.insert(0, f"finetune ended with exit code {training.code}: {training.said}")
    if not ran and not faults:
        faults.append("evaluate never ran")
    if not faults and not alone and not steps:
        raise NotRun("training was over before an evaluation had begun to compute: give a recipe with more steps")
    trained = f"{counted(len(training.log), 'step')} in {training.seconds:.0f} s on device {training.devices[0]}"
    if alone:
        reason = f"{trained}; evaluate on the same device afterwards, since no other is used"
    else:
        reason = f"{trained}; {steps} of them while evaluate computed on device {training.devices[1]}"
    if ran and not faults:
        before, worst = training.before["loss"], max(ran, key=lambda done: _apart(done.result, training)).result
        reason += (
            f", as it said itself ({worst['device']['name']}); its loss {worst['loss']:.6f} is within "
            f"{_apart(worst, training):.0e} (allowed {SAME_LOSS:.0e}) of the {before:.6f} that device "
            f"{training.devices[0]} measured before training with the same model, adapter and data"
        )
    return Finding.of(faults, reason, figures)


def _apart(result: dict[str, Any], training: Training) -> float:
    before = float(training.before["loss"])
    return abs(float(result["loss"]) - before) / max(abs(before), 1e-9)


def _off(result: dict[str, Any], training: Training, listed: dict[str, Any]) -> list[str]:
    """What is wrong with what an evaluation printed: its loss, or the device that it was computed on."""
    faults = _elsewhere(result, listed)
    if not math.isfinite(result["loss"]):
        return [*faults, f"evaluate's loss is {result['loss']}"]
    if not _apart(result, training) <= SAME_LOSS:
        before = training.before["loss"]
        faults.append(f"evaluate's loss is {result['loss']:.6f}, but {before:.6f} was measured before training")
    return faults


def _elsewhere(result: dict[str, Any], listed: dict[str, Any]) -> list[str]:
    said = result["device"]
    return [f"evaluate says {name} {said[name]}, but device {listed['index']} has {listed[name]}" for name in FACTS
            if said[name] != listed[name]]  # fmt: skip


def losses_fall(proof: Proof) -> Finding:
    """Passes where every loss is finite and both the training loss and the held-out loss have fallen by the margins."""
    training = proof.training()
    losses = [line["loss"] for line in training.log]
    stopped = training.record.stop_reason if training.record else "no run.json"
    if stopped in ("non-finite", "diverged"):
        return Finding.of(
            [f"training stopped after {counted(len(losses), 'step')}: {training.said}"], "", {"losses": losses}
        )
    if not all(math.isfinite(line[key]) for line in training.log for key in ("loss", "grad_norm")):
        return Finding.of(["a loss or a gradient in the log is not finite"], "", {"losses": losses})
    if training.code:
        raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
    if len(losses) < FEWEST:
        raise NotRun(f"{counted(len(losses), 'step')} are too few: give a recipe with {FEWEST} or more")
    seen, count = proof.seen_rows()
    finding = _fallen(training, losses, "the loss of eval_data" if seen else "the held-out loss")
    if seen and finding.status == PASSED:
        why = f"{seen} of the {count} rows of eval_data are training rows too, so that no loss is held out"
        return Finding(NOT_RUN, f"{why}; {finding.reason}", finding.figures | {"seen_in_training": seen})
    return finding


def _fallen(training: Training, losses: list[float], name: str) -> Finding:
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
        faults.append(f"{name} went from {before:.4f} to {after:.4f}: it had to fall by {FALL * before:.4f}")
    reason = (
        f"{len(losses)} finite losses; first tenth {first:.4f}, last tenth {last:.4f} (margin {margin:.4f}); "
        f"{name} {before:.4f} to {after:.4f}"
    )
    return Finding.of(faults, reason, figures)
