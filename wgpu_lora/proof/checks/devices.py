"""1. Devices compute. 2. A checkpoint imported in NF4 generates the same answers on every device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun

# Difference of two devices' logits over the largest logit. Sums in another order cause about 1e-6; a weight between two
# NF4 codes that is rounded to the other one causes more.
TOLERANCE = 1e-3


def devices_compute(proof: Proof, finding: Finding) -> str:
    """Passes if every device used multiplied matrices correctly, and two are used if there are two."""
    found = proof.devices()
    devices, used, different = found["devices"], found["used"], len(set(found["hardware"]))
    discrete = sum(device["kind"] == "discrete" for device in devices)
    finding.figures = {name: found[name] for name in ("devices", "used", "computed", "wgpu_native")}
    finding.figures |= {"discrete": discrete, "required_discrete": proof.discrete}
    finding.expect(devices, "wgpu found no device: no driver is installed, or none that works")
    for index, result in found["computed"].items():
        name = f"device {index} ({devices[int(index)]['name']})"
        finding.expect(result["fine"], f"{name} multiplied matrices with an error of {np.float64(result['error']):.1e}")
    fault = f"only {len(used)} of {different} different devices are used"
    finding.expect(found["asked"] or len(used) >= min(2, different), fault)
    lacking = proof.lacks_discrete()
    finding.expect(not lacking, f"{lacking}")
    unused = len(devices) - len(used)
    left = f"; {unused} left out by --devices" if found["asked"] and unused else ""
    names = ", ".join("{index} {name} ({driver}, {backend}, {kind})".format(**devices[index]) for index in used)
    return f"{len(devices)} found, {discrete} discrete; used: {names}{left}"


def devices_agree(proof: Proof, finding: Finding) -> str:
    """Imports the checkpoint on each device, generates with the packed model, and compares all with the first."""
    found = {index: generated(proof, index) for index in proof.used()}
    for index, made in found.items():
        packed, matrices = made["packed_matrices"], made["matrices"]
        finding.expect(packed == matrices, f"device {index} holds {packed} of {matrices} matrices in NF4")
        finding.expect(any(answer["ids"] for answer in made["answers"]), f"device {index} generated nothing")
    finding.figures = {"tolerance": TOLERANCE, "generated": found}
    first, *others = found
    answers = found[first]["answers"]
    tokens = sum(len(answer["ids"]) for answer in answers)
    if not others:
        raise NotRun(f"the only device imported the model and generated {tokens} tokens: there is nothing to compare")
    compared = finding.figures["compared"] = {index: compare(found[first], found[index]) for index in others}
    finding.faults += [f"device {index}: {fault}" for index, result in compared.items() for fault in result["faults"]]
    worst = max(result["worst"] for result in compared.values())
    ties = sum(result["near_ties"] for result in compared.values())
    return (
        f"{found[first]['packed_matrices']} matrices packed to NF4 on each of {len(found)} devices; logits within "
        f"{worst:.1e} of the largest (allowed {TOLERANCE:.0e}); {len(answers)} greedy answers with {tokens} tokens are "
        f"the same{f' except for {ties} near-ties' if ties else ''}"
    )


def generated(proof: Proof, index: int) -> dict[str, Any]:
    packed, arrays = (str(proof.out / "work" / name) for name in (f"packed-{index}", f"logits-{index}.npz"))
    proof.children.run(f"import-{index}", "import", model=proof.args.model, output=packed, device=index)
    options = {"options": replace(proof.args, model=packed).as_dict(), "device": index, "arrays": arrays}
    return {**proof.children.run(f"generate-{index}", "proof-generate", **options), "arrays": arrays}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two devices' answers: the largest difference of their logits while they are the same, and why they diverge."""
    faults: list[str] = []
    worst, near_ties = 0.0, 0
    with np.load(a["arrays"]) as logits_a, np.load(b["arrays"]) as logits_b:
        for number, (x, y) in enumerate(zip(a["answers"], b["answers"], strict=True)):
            one, other = logits_a[f"arr_{number}"], logits_b[f"arr_{number}"]
            same = common(x["ids"], y["ids"])
            # Logits after the same tokens can be compared, including those at which the answers diverge.
            count = min(same + 1, len(one), len(other))
            scale = max((float(np.abs(part).max()) for part in (one, other) if len(part)), default=1.0)
            if count:
                difference = float(np.abs(one[:count] - other[:count]).max()) / scale
                worst = max(worst, difference) if np.isfinite(difference) else float("inf")
            if x["ids"] == y["ids"]:
                continue
            gap = np.float64((x["gaps"] if len(x["gaps"]) > same else y["gaps"])[same])  # NaN for null
            if gap < TOLERANCE * scale:
                near_ties += 1
            else:
                faults.append(
                    f"answer {number + 1} diverges at token {same + 1}, where the likeliest leads by {gap:.2g}"
                )
    if not worst <= TOLERANCE:
        faults.append(f"logits differ by {worst:.1e} of the largest, more than {TOLERANCE:.0e}")
    return {"worst": worst, "near_ties": near_ties, "faults": faults}


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two answers begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
