"""What the checks share: the recipe, the child processes, and results of these, computed when first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from wgpu_lora.data import training_data
from wgpu_lora.data.files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.finding import NotRun
from wgpu_lora.proof.heldout import seen_rows
from wgpu_lora.proof.training import Training, train
from wgpu_lora.train.finetune import with_demo_data
from wgpu_lora.train.gather import gather
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.words import counted
from wgpu_lora.worker.parent import WorkerFailed

T = TypeVar("T")


class Refused(UserError):
    """--devices cannot be followed, so there is nothing to prove."""


def once(make: Callable[[Proof], T]) -> Callable[[Proof], T]:
    """A method that runs once. If a worker fails in it, the first caller fails, and for others it raises NotRun."""

    def get(proof: Proof) -> T:
        made, name = proof.made, make.__name__
        if isinstance(made.get(name), WorkerFailed):
            raise NotRun(f"it needs what failed before: {made[name]}")
        if name not in made:
            try:
                made[name] = make(proof)
            except WorkerFailed as error:
                made[name] = error
                raise
        return made[name]

    return get


@dataclass
class Proof:
    """One proof. args: the recipe's options, with files for data and eval_data. made: the results of its methods.

    select, discrete: --devices and --require-discrete.
    """

    out: Path
    recipe: Path
    args: TrainingArguments
    select: str | None
    children: Children
    discrete: int = 0
    allow_unconfined: bool = False
    made: dict[str, Any] = field(default_factory=dict)

    @once
    def devices(self) -> dict[str, Any]:
        """The result of jobs.devices. Raises Refused if --devices cannot be followed."""
        found: dict[str, Any] = self.children.run(
            "devices", "proof-devices", select=self.select, discrete=self.discrete
        )
        if "refused" in found:
            raise Refused(found["refused"])
        return found

    def known(self) -> dict[str, Any]:
        """The same for a report: empty if no check needed the devices, or if they could not be listed."""
        found = self.made.get("devices")
        return found if isinstance(found, dict) else {}

    def lacks_discrete(self) -> str | None:
        """Why --require-discrete is not met, if it is not."""
        if not self.discrete:
            return None
        try:
            used = sum(device["kind"] == "discrete" for device in hardware(self.devices()))
        except WorkerFailed as error:
            return f"--require-discrete {self.discrete}, but the devices could not be listed: {error}"
        if used >= self.discrete:
            return None
        gpus = counted(used, "discrete GPU is", "discrete GPUs are")
        return f"--require-discrete {self.discrete} is not met: {gpus} used"

    def used(self) -> list[int]:
        """Device indices; the first one trains."""
        if not self.devices()["used"]:
            raise NotRun("there is no device (check 1)")
        return self.devices()["used"]

    def device(self, index: int) -> dict[str, Any]:
        return self.devices()["devices"][index]

    @once
    def training(self) -> Training:
        """The fine-tuning run, whether it succeeded or not."""
        return train(self.children, self.recipe, self.args, self.out / "run", self.used())

    def trained(self) -> Training:
        """The fine-tuning run. Raises NotRun if it did not succeed."""
        training = self.training()
        if training.code:
            raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
        return training

    @cached_property
    def seen_rows(self) -> tuple[int, int]:
        """How many of the held-out rows are training rows too, and how many there are."""
        return seen_rows(Path(str(self.args.data)), Path(str(self.args.eval_data)))


def hardware(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices used, each once even if several APIs list it; `found` is the result of jobs.devices, or empty."""
    indices = {found["hardware"][index]: index for index in found.get("used", [])}
    return [found["devices"][index] for index in indices.values()]


def read_recipe(recipe: str) -> tuple[TrainingArguments, Path]:
    """A recipe's options, and its path.

    Raises:
        UserError: it cannot be read, has no held-out data, has data that are not files, or has another base_dtype.
    """
    args, path = gather({}, recipe, "The command line")
    assert path
    args = with_demo_data(args)
    assert args.data
    data, heldout = training_data(args.data, args.eval_data, split=args.split, eval_split=args.eval_split)
    for source in (data, heldout):
        if source and not isinstance(source, FileSource):
            raise UserError(f"A proof reads files, but {source.path} is a data set: save it to a file.")
    if not heldout:
        raise UserError(f"The recipe {path} has no held-out data, which a proof needs: give it eval_data.")
    if args.base_dtype != DEFAULT_FORMAT:
        wanted = DEFAULT_FORMAT.upper()
        raise UserError(
            f"The recipe {path} has base_dtype {args.base_dtype}, but a proof is for {wanted}: leave it out."
        )
    resolve_model(args.model or "demo")
    return replace(args, data=data.path, split=None, eval_data=heldout.path, eval_split=None, resume=False), path
