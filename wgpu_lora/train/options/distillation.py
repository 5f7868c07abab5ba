"""Options of distillation (--objective kd)."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.train.declared import NOT_NEGATIVE, Range, option
from wgpu_lora.weights.registry import BASE_FORMATS

DISTILLATION = "Distillation (--objective kd)"  # their heading in help


@dataclass(frozen=True)
class DistillationOptions:
    """The teacher, and what is learned from it."""

    teacher_cache: str | None = option(
        None, DISTILLATION, "Directory that teacher-cache has written for the rows of --data, instead of --teacher."
    )
    eval_teacher_cache: str | None = option(
        None,
        DISTILLATION,
        "The same for the rows of --eval-data; those of --validation-split are in --teacher-cache.",
    )
    teacher: str | None = option(
        None,
        DISTILLATION,
        "Model that runs beside the student on the same device: a directory, GGUF file, hub id, or 'demo'. If it is "
        "the student's own base, that is not loaded twice.",
    )
    teacher_adapter: str | None = option(None, DISTILLATION, "PEFT adapter directory of the teacher.")
    teacher_base_dtype: str | None = option(
        None,
        DISTILLATION,
        "Storage type of the teacher's weights. Default: that in which it is stored, else --base-dtype; nf4 if the "
        "student's base is stored quantised, or trained.",
        choices=BASE_FORMATS,
    )
    teacher_top_k: int = option(
        64,
        DISTILLATION,
        "Tokens of --teacher that are compared one by one; all others are one bucket.",
        within=Range(at_least=1),
    )
    temperature: float = option(
        1.0,
        DISTILLATION,
        "What the logits of both are divided by. As in TRL, the loss is not multiplied by its square.",
        within=Range(at_least=0.05, at_most=100),
    )
    kd_divergence: str = option(
        "forward_kl",
        DISTILLATION,
        "Divergence from the teacher: forward_kl and reverse_kl are TRL's GKD with beta 0 and 1, jsd is that between.",
        choices=("forward_kl", "reverse_kl", "jsd"),
    )
    kd_beta: float = option(
        0.5,
        DISTILLATION,
        "jsd: the teacher's share of the mixture, TRL's beta.",
        within=Range(above=0, below=1),
    )
    kd_weight: float = option(1.0, DISTILLATION, "Weight of the divergence.", within=NOT_NEGATIVE)
    hard_top1_weight: float = option(
        0.0, DISTILLATION, "Weight of the cross-entropy on the teacher's most likely token.", within=NOT_NEGATIVE
    )
    hard_full_weight: float = option(
        0.0, DISTILLATION, "Weight of the cross-entropy on the tokens of the data.", within=NOT_NEGATIVE
    )
