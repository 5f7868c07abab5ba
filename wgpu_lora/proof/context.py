"""What the checks share: the recipe, the child processes, and what these found, each started when first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from wgpu_lora.data import training_data
from wgpu_lora.data.files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.finding import NotRun
from wgpu_lora.proof.heldout import seen_rows
from wgpu_lora.proof.training import Training, train
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import with_demo_data
from wgpu_lora.train.recipes import gather
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.worker.parent import WorkerFailed

P = ParamSpec("P")
T = TypeVar("T")


class Refused(UserError):
    """--devices cannot be followed, so there is nothing to prove."""


def once(make: Callable[Concatenate[Proof, P], T]) -> Callable[Concatenate[Proof, P], T]:
    """A method that runs once for given arguments. A failed worker fails its first caller; later ones could not run."""

    @wraps(make)
    def get(proof: Proof, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key, made = (make.__name__, *args), proof.made
        if key not in made:
            try:
                made[key] = make(proof, *args, **kwargs)
            except WorkerFailed as error:
                made[key] = error
                raise
        elif isinstance(made[key], WorkerFailed):
            raise NotRun(f"it needs what failed before: {made[key]}")
        return made[key]

    return get


@dataclass
class Proof:
    """One proof.

    args: the recipe's options; held-out data are among them. select: --devices. discrete: --require-discrete.
    made: the results of its methods.
    """

    out: Path
    recipe: Path
    args: TrainingArguments
    select: str | None
    children: Children
    discrete: int = 0
    allow_unconfined: bool = False
    made: dict[tuple[object, ...], Any] = field(default_factory=dict)

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
        found = self.made.get(("devices",))
        return found if isinstance(found, dict) else {}

    def lacks_discrete(self) -> str | None:
        """Why --require-discrete is not met, if it is not."""
        used = sum(device["kind"] == "discrete" for device in hardware(self.devices())) if self.discrete else 0
        gpus = "discrete GPU is" if used == 1 else "discrete GPUs are"
        return None if used >= self.discrete else f"--require-discrete {self.discrete} is not met: {used} {gpus} used"

    def used(self) -> list[int]:
        """Device indices; the first one trains."""
        if not self.devices()["used"]:
            raise NotRun("there is no device (check 1)")
        return self.devices()["used"]

    def device(self, index: int) -> dict[str, Any]:
        return self.devices()["devices"][index]

    def options(self, **changes: Any) -> dict[str, Any]:
        """The recipe's options, as a job takes them."""
        return replace(self.args, **changes).as_dict()

    @once
    def generation(self, index: int) -> dict[str, Any]:
        """Imports the checkpoint on a device and generates with the packed model; `arrays` has the logits."""
        packed, arrays = self.out / "work" / f"packed-{index}", str(self.out / "work" / f"logits-{index}.npz")
        self.children.run(f"import-{index}", "import", model=self.args.model, output=str(packed), device=index)
        options = self.options(model=str(packed))
        found = self.children.run(f"generate-{index}", "proof-generate", options=options, device=index, arrays=arrays)
        return found | {"arrays": arrays}

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

    @once
    def seen_rows(self) -> tuple[int, int]:
        """How many of the held-out rows are training rows too, and how many there are."""
        train_file, heldout = _files(self.args)
        return seen_rows(Path(train_file), Path(heldout))

    @once
    def answers(self, name: str, adapter: str | None) -> list[dict[str, Any]]:
        """Answers to the held-out requests with an adapter, and the results of their unit checks."""
        given = {"device": self.used()[0], "adapter": adapter, "allow_unconfined": self.allow_unconfined}
        return self.children.run(name, "proof-answers", options=self.options(), **given)


def hardware(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices used, each once even if several APIs list it; `found` is the result of jobs.devices, or empty."""
    indices = dict(zip(found.get("hardware", []), found.get("used", []), strict=True))
    return [found["devices"][index] for index in indices.values()]


def read_recipe(recipe: str) -> tuple[TrainingArguments, Path]:
    """A recipe's options, and its path.

    Raises:
        UserError: it cannot be read, has no held-out data, or keeps the base in another format.
    """
    args, path = gather({}, recipe, "The command line")
    assert path
    args = with_demo_data(args)
    files = _files(args)
    if len(files) < 2:
        raise UserError(f"The recipe {path} has no held-out data, which a proof needs: give it eval_data.")
    if args.base_dtype != DEFAULT_FORMAT:
        proven, kept = DEFAULT_FORMAT.upper(), args.base_dtype
        raise UserError(f"The recipe {path} keeps the base in {kept}: a proof is of {proven}, so leave it out.")
    resolve_model(args.model or "demo")
    return replace(args, data=files[0], split=None, eval_data=files[1], eval_split=None, resume=False), path


def _files(args: TrainingArguments) -> list[str]:
    """The training file and, if there is one, the held-out file. Raises UserError if they are not files."""
    assert args.data
    sources = training_data(args.data, args.eval_data, split=args.split, eval_split=args.eval_split)
    for source in sources:
        if source and not isinstance(source, FileSource):
            raise UserError(f"A proof reads files, and {source.path} is a data set: save it as one.")
    return [source.path for source in sources if source]
