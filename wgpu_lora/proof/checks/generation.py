"""2. A checkpoint imported in NF4 generates the same on every device."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun, finite_or_nan

# Of two devices' logits, over the largest logit. Sums in another order cost some 1e-6; an odd weight that lies between
# two NF4 codes and is rounded to the other one costs more.
TOLERANCE = 1e-3


def devices_agree(proof: Proof) -> Finding:
    """Compares each further device with the first."""
    first, *others = proof.used()
    found = {index: proof.generation(index) for index in (first, *others)}
    faults = []
    for index, generated in found.items():
        if generated["packed_matrices"] != generated["matrices"]:
            faults.append(
                f"device {index} holds {generated['packed_matrices']} of {generated['matrices']} matrices in NF4"
            )
        if not any(answer["ids"] for answer in generated["answers"]):
            faults.append(f"device {index} generated nothing")
    figures: dict[str, Any] = {
        "tolerance": TOLERANCE,
        "generated": {index: {k: v for k, v in made.items() if k != "arrays"} for index, made in found.items()},
    }
    if not others and not faults:
        tokens = sum(len(answer["ids"]) for answer in found[first]["answers"])
        raise NotRun(f"one device alone: it imported and generated {tokens} tokens, with nothing to compare them with")
    compared = {index: compare(found[first], found[index]) for index in others}
    figures["compared"] = compared
    for index, result in compared.items():
        faults += [f"device {index}: {fault}" for fault in result["faults"]]
    worst = max((result["worst"] for result in compared.values()), default=0.0)
    ties = sum(result["near_ties"] for result in compared.values())
    tokens = sum(len(answer["ids"]) for answer in found[first]["answers"])
    answers = f"{len(found[first]['answers'])} greedy answers of {tokens} tokens"
    reason = (
        f"{found[first]['packed_matrices']} matrices packed to NF4 on each of {len(found)} devices; logits within "
        f"{worst:.1e} of the largest (allowed {TOLERANCE:.0e}); {answers} the same"
        + (f" but for {ties} near-ties" if ties else "")
    )
    return Finding.of(faults, reason, figures)


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two devices' answers: the worst difference of their logits before they part, and why they part."""
    faults: list[str] = []
    worst, near_ties = 0.0, 0
    with np.load(a["arrays"]) as logits_a, np.load(b["arrays"]) as logits_b:
        for number, (x, y) in enumerate(zip(a["answers"], b["answers"], strict=True)):
            one, other = logits_a[f"arr_{number}"], logits_b[f"arr_{number}"]
            same = common(x["ids"], y["ids"])
            # The logits after a common beginning are of the same question, those at which the answers part too.
            count = min(same + 1, len(one), len(other))
            scale = max((float(np.abs(part).max()) for part in (one, other) if len(part)), default=1.0)
            if count:
                difference = float(np.abs(one[:count] - other[:count]).max()) / scale
                worst = max(worst, difference) if np.isfinite(difference) else float("inf")
            if x["ids"] == y["ids"]:
                continue
            gap = finite_or_nan((x["gaps"] if len(x["gaps"]) > same else y["gaps"])[same])
            if gap < TOLERANCE * scale:
                near_ties += 1
            else:
                faults.append(f"answer {number + 1} parts at token {same + 1}, where the likeliest leads by {gap:.2g}")
    if not worst <= TOLERANCE:
        faults.append(f"logits differ by {worst:.1e} of the largest, more than {TOLERANCE:.0e}")
    return {"worst": worst, "near_ties": near_ties, "faults": faults}


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two answers begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
