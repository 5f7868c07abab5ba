"""The checks of a proof, except the sixth. Each fills a Finding, and returns its result in a sentence."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.cli.proof.cuda_check import no_cuda
from wgpu_lora.cli.proof.proof_context import Finding, NotRun, Proof, request_of, rows_of
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.checks.asserts import parse_check
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox.sandbox_process import confinement
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.training_log import LOG, read_log

# Difference of two devices' logits over the largest logit. Sums in another order cause about 1e-6; a weight between two
# NF4 codes that is rounded to the other one causes more.
TOLERANCE = 1e-3


def devices_compute(proof: Proof, finding: Finding) -> str:
    """Passes if every device used multiplied matrices correctly, and two are used if there are two."""
    value = proof.devices
    devices, indices, different = value["devices"], value["used"], len(set(value["hardware"]))
    discrete = sum(device["kind"] == "discrete" for device in devices)
    finding.figures = {name: value[name] for name in ("devices", "used", "computed", "webgpu")}
    finding.figures |= {"discrete": discrete, "required_discrete": proof.discrete}
    error = value.get("error", "wgpu found no device: no driver is installed, or none that works")
    finding.expect(devices, error)
    for index, result in value["computed"].items():
        name = f"device {index} ({devices[int(index)]['name']})"
        finding.expect(result["fine"], f"{name} multiplied matrices with an error of {np.float64(result['error']):.1e}")
    has_enough = value["asked"] or len(indices) >= min(2, different)
    finding.expect(has_enough, f"only {len(indices)} of {different} different devices are used")
    lacking = proof.lacks_discrete()
    finding.expect(not lacking, f"{lacking}")
    names = ", ".join("{index} {name} ({driver}, {backend}, {kind})".format(**devices[index]) for index in indices)
    return f"{len(devices)} found, {discrete} discrete; used: {names}"


def devices_agree(proof: Proof, finding: Finding) -> str:
    """Imports the checkpoint on each device, generates with the packed model, and compares all with the first."""
    arrays = {index: str(proof.out / "work" / f"logits-{index}.npz") for index in proof.device_indices()}
    children = {
        index: proof.children.start(
            f"generate-{index}", "proof-generate", options=proof.args.as_dict(), device=index, arrays=path
        )
        for index, path in arrays.items()
    }
    value = {index: {**child.result(), "arrays": arrays[index]} for index, child in children.items()}
    for index, new in value.items():
        packed, matrices = new["packed_matrices"], new["matrices"]
        finding.expect(packed == matrices, f"device {index} holds {packed} of {matrices} matrices in NF4")
        finding.expect(any(answer["ids"] for answer in new["answers"]), f"device {index} generated nothing")
    finding.figures = {"tolerance": TOLERANCE, "generated": value}
    first, *other_indices = value
    answers = value[first]["answers"]
    tokens = sum(len(answer["ids"]) for answer in answers)
    if not other_indices:
        raise NotRun(f"the only device imported the model and generated {tokens} tokens: there is nothing to compare")
    compared = finding.figures["compared"] = {index: compare(value[first], value[index]) for index in other_indices}
    finding.faults += [f"device {index}: {fault}" for index, result in compared.items() for fault in result["faults"]]
    worst = max(result["worst"] for result in compared.values())
    ties = sum(result["near_ties"] for result in compared.values())
    return (
        f"{value[first]['packed_matrices']} matrices packed to NF4 on each of {len(value)} devices; logits within "
        f"{worst:.1e} of the largest (allowed {TOLERANCE:.0e}); {len(answers)} greedy answers with {tokens} tokens are "
        f"the same{f' except for {ties} near-ties' if ties else ''}"
    )


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two devices' answers: the largest difference of their logits while they are the same, and why they diverge."""
    faults: list[str] = []
    worst, near_ties = 0.0, 0
    with np.load(a["arrays"]) as logits_a, np.load(b["arrays"]) as logits_b:
        for number, (x, y) in enumerate(zip(a["answers"], b["answers"], strict=True)):
            first, second = logits_a[f"arr_{number}"], logits_b[f"arr_{number}"]
            pairs = enumerate(zip(x["ids"], y["ids"], strict=False))
            prefix = next((i for i, (u, v) in pairs if u != v), min(len(x["ids"]), len(y["ids"])))
            # Logits after the same tokens can be compared, including those at which the answers diverge.
            count = min(prefix + 1, len(first), len(second))
            scale = float(max(np.abs(first).max(initial=0), np.abs(second).max(initial=0)))
            difference = float(np.abs(first[:count] - second[:count]).max(initial=0)) / (scale or 1)
            worst = max(worst, difference) if np.isfinite(difference) else math.inf
            if x["ids"] == y["ids"]:
                continue
            gap = np.float64((x["gaps"] if len(x["gaps"]) > prefix else y["gaps"])[prefix])  # NaN for null
            near_ties += bool(gap < TOLERANCE * scale)
            if not gap < TOLERANCE * scale:
                faults.append(
                    f"answer {number + 1} diverges at token {prefix + 1}, where the likeliest leads by {gap:.2g}"
                )
    if not worst <= TOLERANCE:
        faults.append(f"logits differ by {worst:.1e} of the largest, more than {TOLERANCE:.0e}")
    return {"worst": worst, "near_ties": near_ties, "faults": faults}


DEVICE_TOLERANCE = 1e-3  # relative, on two devices, which may round a weight between two NF4 codes differently
FALL = 0.05  # by which share losses have to fall
DEVIATIONS = 3  # of the difference of two means, from the scatter of the last tenth
FEWEST = 20  # steps, so that a tenth is more than one


def training_and_evaluation(proof: Proof, finding: Finding) -> str:
    """Passes if both ended well and, with two devices, steps were taken while an evaluation computed."""
    training = proof.training
    if not training.before:
        finding.faults.append(training.reason)
        return ""
    first, last = training.devices[0], training.devices[-1]
    before, steps = (
        float(training.before["loss"]),
        max((evaluation.steps for evaluation in training.evaluations), default=0),
    )
    seconds = training.record.state.seconds if training.record else 0.0
    finding.figures = {
        "devices": training.devices,
        "finetune": {"exit_code": training.code, "seconds": seconds, "steps": len(training.log)},
        "evaluations": [vars(evaluation) for evaluation in training.evaluations],
        "before": training.before,
        "loss_tolerance": DEVICE_TOLERANCE,
        "at_the_same_time": first != last,
        "steps_while_evaluating": steps,
    }
    finding.expect(not training.code, f"fine-tuning ended with exit code {training.code}: {training.reason}")
    finding.expect(training.evaluations, "evaluate never ran")
    finding.faults += [evaluation.failed for evaluation in training.evaluations if evaluation.failed]
    results = [evaluation.result for evaluation in training.evaluations if not evaluation.failed]
    losses = np.array([result["loss"] for result in results], float)  # null becomes NaN
    deviations = np.abs(losses - before) / max(abs(before), 1e-9)
    for loss, share in zip(losses, deviations, strict=True):
        finding.expect(share <= DEVICE_TOLERANCE, f"evaluate's loss is {loss:.6f}, but it was {before:.6f} before")
    for index, result in ((first, training.before), *((last, result) for result in results)):
        finding.expect_device(proof.devices["devices"][index], "evaluate", result["device"])
    if first != last and not steps:
        raise NotRun("training was over before an evaluation had begun to compute: give a recipe with more steps")
    if finding.faults:
        return ""
    overlap = f"{steps} of them while evaluate ran on device {last}"
    if first == last:
        overlap = "evaluate ran afterwards on the same device, since no other is used"
    return (
        f"{count_noun(len(training.log), 'step')} took {seconds:.0f} s on device {first}; {overlap}; its loss "
        f"{losses[deviations.argmax()]:.6f} is within {deviations.max():.0e} (allowed {DEVICE_TOLERANCE:.0e}) of the "
        f"{before:.6f} measured on device {first} before training with the same model, adapter and data"
    )


def losses_fall(proof: Proof, finding: Finding) -> str:
    """Passes if the log has a finite loss of every step, and training and held-out loss fell by the margins."""
    training = proof.training
    finding.figures["losses"] = losses = [line["loss"] for line in training.log]
    record, count, steps = training.record, count_noun(len(losses), "step"), len(losses)
    if record:
        steps = record.state.step
        finite = record.stop_reason not in ("non-finite", "diverged")
        finding.expect(finite, f"training stopped after {count}: {training.reason}")
    # Lines with other values than finite numbers count as damaged, and are not read.
    complete = [line["step"] for line in training.log] == list(range(1, steps + 1))
    finding.expect(complete, f"the log has finite numbers for {count} of {steps:,} only")
    if finding.faults:
        return ""
    if training.code:
        raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
    if len(losses) < FEWEST:
        raise NotRun(f"{count} are too few: give a recipe with {FEWEST} or more")
    leaked, rows = proof.leaked_rows
    name = "the loss of eval_data" if leaked else "the held-out loss"
    tenth = len(losses) // 10
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    margin = max(FALL * first, DEVIATIONS * statistics.stdev(losses[-tenth:]) * math.sqrt(2 / tenth))
    before = float(training.before["loss"])
    heldout = [(0, before), *((line["step"], line["eval_loss"]) for line in training.log if "eval_loss" in line)]
    after = heldout[-1][1] if heldout[1:] else math.nan
    finding.figures |= {"first_tenth": first, "last_tenth": last, "margin": margin, "heldout": heldout}
    finding.figures |= {"heldout_margin": FALL * before, "seen_in_training": leaked}
    falls = {"the loss": (first, last, margin), name: (before, after, FALL * before)}
    for label, (start, end, drop) in falls.items():
        finding.expect(start - end > drop, f"{label} went from {start:.4f} to {end:.4f}, not down by {drop:.4f}")
    summary = (
        f"{len(losses)} finite losses; first tenth {first:.4f}, last tenth {last:.4f} (margin {margin:.4f}); "
        f"{name} {before:.4f} to {after:.4f}"
    )
    if leaked:
        raise NotRun(f"{leaked} of the {rows} rows of eval_data are training rows too, so none is held out; {summary}")
    return summary


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
    recorded = training.record.environment.device
    device = {name: getattr(recorded, name) for name in ("name", "driver", "backend", "kind")}
    clock = proof.step["clock"]
    logged, loss = training.log[0]["loss"], float(np.float64(clock["loss"]))  # null becomes NaN
    share = clock["device_seconds"] / clock["host_seconds"]
    finding.figures = {"device": device, "clock": clock, "share": share, "logged_loss": logged}
    finding.expect_device(proof.devices["devices"][training.devices[0]], "run.json", device)
    is_equal = abs(loss - logged) <= SAME_LOSS * abs(logged)
    finding.expect(is_equal, f"the timed step's loss is {loss:.7f}, but the run logged {logged:.7f}")
    finding.expect(clock["dispatches"], "no kernel was dispatched")
    by = "the device has no timestamps, so only the dispatches were counted"
    if clock["clock"] == "timestamps":
        by = f"the device's timestamps account for {clock['device_seconds']:.4f} s, {share:.0%} of the step's time"
        finding.expect(0 < share <= 1 + SKEW, f"{by}, which is impossible")
    return (
        f"{recorded.name}, {recorded.driver}, {recorded.backend}; the first step, repeated afterwards in "
        f"{clock['dispatches']} dispatches, has the logged loss, {logged:.6f}; {by}"
    )


def gradients_agree(proof: Proof, finding: Finding) -> str:
    """Passes if the recorded gradient predicts every measured difference of the loss, within f32's rounding."""
    if proof.args.compute_dtype != "f32":
        raise NotRun(f"activations are rounded to {proof.args.compute_dtype}: finite differences need f32")
    result = proof.step["gradients"]
    rounding = EXTRAPOLATED * result["rounding"]
    finding.figures = {**result, "tolerance": {"of_one": OF_ONE, "of_the_loss": rounding, "of_all": OF_ALL}}
    count, rows = len(result["directions"]), [row for row in result["directions"] if row["length"] is not None]
    bent = count - len(rows)
    finding.expect(bent <= BENT * count, f"the loss is too curved along {bent} of {count} directions")
    # Null becomes NaN.
    differences, gradient = (np.array([row[name] for row in rows], float) for name in ("measured", "gradient"))
    finding.expect(gradient.any(), "every gradient is zero")
    tolerances = OF_ONE * np.abs(gradient) + rounding * abs(np.float64(result["loss"]))
    for row, moved, slope, tolerance in zip(rows, differences, gradient, tolerances, strict=True):
        changes = f"along {row['matrix']} the loss changes by {moved:.3e}"
        finding.expect(abs(moved - slope) <= tolerance, f"{changes}, but the gradient predicts {slope:.3e}")
    together = float(np.linalg.norm(differences - gradient) / (np.linalg.norm(gradient) or 1))
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
    log, steps = training.log, run_checkpoint.list_checkpoints(training.directory / run_checkpoint.STEPS)
    if len(steps) < 2 or steps[-1][0] != len(log):
        raise NotRun("the run kept no checkpoint before its last step: give a recipe with smaller save_steps")
    (step, earlier), (final_step, final) = steps[-2:]
    resumed = proof.out / "resumed"
    shutil.copytree(earlier, resumed / run_checkpoint.STEPS / earlier.name)
    # Without later lines, so that those compared were written by the resumed run.
    (resumed / LOG).write_text("".join(json.dumps(line) + "\n" for line in log if line["step"] <= step))
    proof.children.run("resume", "finetune", **proof.finetune_options(resumed), resume=True)
    resumed_checkpoint = resumed / run_checkpoint.STEPS / final.name
    parts = ("adapter_model.safetensors", run_checkpoint.OPTIMIZER)
    equality = {name: (final / name).read_bytes() == (resumed_checkpoint / name).read_bytes() for name in parts}
    first, second = ([[line.get(key) for key in LOGGED] for line in lines] for lines in (log, read_log(resumed / LOG)))
    finding.figures = {
        "compared": [*parts, *(f"{LOG}: {name}" for name in LOGGED)],
        "from_step": step,
        "to_step": final_step,
        "same": equality,
        "same_log": first == second,
    }
    for name, equal in equality.items():
        finding.expect(equal, f"{name} differs after resuming")
    finding.expect(first == second, "the losses, rates or gradient norms of the log differ after resuming")
    moved = (final / parts[0]).read_bytes() != (earlier / parts[0]).read_bytes()
    finding.expect(moved, f"no step after {step} changed the adapter, so resuming shows nothing")
    return (
        f"resumed from step {step}, step {final_step} is the same: adapter and moments byte for byte; "
        f"losses, rates and gradient norms in the log's {len(log)} lines, of which {final_step - step} are new"
    )


MARGIN = 0.1  # of the requests: how many more must pass after training


def answers_pass_their_checks(proof: Proof, finding: Finding) -> str:
    """Passes if more answers pass after training, by the margin."""
    args = proof.args
    assert args.eval_data
    rows = list(rows_of(args.eval_data).values())
    if not all("check" in row for row in rows):
        raise NotRun("the held-out rows have no unit checks")
    requests = [request_of(row) for row in rows]
    if not all(requests):
        raise NotRun("a held-out row is not a conversation without tools, with a message before its last answer")
    leaked, count = proof.leaked_rows
    if leaked:
        raise NotRun(f"{leaked} of {count} held-out rows are training rows too: their answers could be memorised")
    adapters = {"before": args.init_adapter, "after": str(proof.trained().directory)}
    options: dict[str, Any] = {"model": args.model or "demo", "base_dtype": args.base_dtype, "prompts": requests}
    options |= {"enable_thinking": args.enable_thinking, "device": proof.device_indices()[0]}
    texts = proof.children.run("answers", "proof-answers", adapters=[*adapters.values()], **options)
    answers: dict[str, list[dict[str, Any]]] = {}
    for phase, of in zip(adapters, texts, strict=True):
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each check is a process of its own
            run = partial(run_check, allow_unconfined=proof.allow_unconfined)
            verdicts = list(pool.map(run, of, [row["check"] for row in rows]))
        parsed, passed = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("parses", "passed"))
        score = {"requests": len(rows), "parsed": parsed, "passed": passed, "pass_rate": passed / len(rows)}
        finding.figures[phase] = score
        pairs = zip(of, verdicts, strict=True)
        answers[phase] = [{"text": text, "passed": verdict.passed, **asdict(verdict)} for text, verdict in pairs]
    finding.figures["margin"] = MARGIN
    finding.figures["answers"] = [
        {"request": "\n".join(str(message["content"]) for message in request), "before": old, "after": new}
        for request, old, new in zip(requests, *answers.values(), strict=True)
    ]
    was, now = (finding.figures[phase]["passed"] for phase in adapters)
    result = f"{was} of {len(rows)} answers passed before training and {now} after"
    finding.expect(now - was >= MARGIN * len(rows), f"{result}, but {MARGIN:.0%} more had to")
    return f"{result}, when {finding.figures['after']['parsed']} could be parsed"


def check_answers_can_run(args: TrainingArguments, allow_unconfined: bool) -> None:
    """Called before training.

    Raises:
        UserError: a unit check is invalid, or answers cannot be confined and that is not allowed.
    """
    assert args.eval_data
    rows = rows_of(args.eval_data)
    if all("check" in row for row in rows.values()):
        for where, row in rows.items():
            parse_check(row["check"], f"{where},")
        try:
            confinement(allow_unconfined)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, or leave out check 7 by --only.") from None


# Each notes figures and faults, and returns what it found if there is no fault.
CHECKS: dict[int, tuple[str, Callable[[Proof, Finding], str]]] = {
    1: ("devices", devices_compute),
    2: ("import and generate", devices_agree),
    3: ("finetune, evaluate", training_and_evaluation),
    4: ("losses fall", losses_fall),
    5: ("backend", work_happened_on_the_device),
    6: ("no CUDA", no_cuda),
    7: ("answers", answers_pass_their_checks),
    8: ("gradients", gradients_agree),
    9: ("resume", resuming_is_exact),
}
