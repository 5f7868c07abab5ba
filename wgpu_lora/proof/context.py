"""What the checks share: the recipe, the child processes, and what these found, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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


class Refused(UserError):
    """What was asked for cannot be followed, so there is nothing to prove."""


@dataclass
class Proof:
    """One proof. args: the recipe's options, with held-out data for certain.

    select: what --devices says, None where it is left out. discrete: how many discrete devices have to be used.
    allow_unconfined: of answers.
    """

    out: Path
    recipe: Path
    args: TrainingArguments
    select: str | None
    children: Children
    discrete: int = 0
    allow_unconfined: bool = False
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """Where the proof's fine-tuning run is."""
        return self.out / "run"

    def options(self, **changes: Any) -> dict[str, Any]:
        """The recipe's options as a job takes them."""
        return replace(self.args, **changes).as_dict()

    # -- what children find ----------------------------------------------------------------------------------------

    def devices(self) -> dict[str, Any]:
        """What jobs.devices found. Raises Refused where --devices cannot be followed."""
        asked = {"select": self.select, "discrete": self.discrete}
        found = self._once("devices", lambda: self.children.run("devices", "proof-devices", **asked))
        if "refused" in found:
            raise Refused(found["refused"])
        return found

    def known(self) -> dict[str, Any]:
        """The same for a report: empty where no check asked for the devices, or they could not be found out."""
        found = self._made.get("devices")
        return found if isinstance(found, dict) else {}

    def lacks_discrete(self) -> str | None:
        """What --require-discrete asks for and is not used; None where nothing is missing."""
        if not self.discrete:
            return None
        found = self.devices()
        devices, hardware = found["devices"], zip(found["used"], found["hardware"], strict=True)
        used = len({name for index, name in hardware if devices[index]["kind"] == "discrete"})
        gpus = "discrete GPU is" if used == 1 else "discrete GPUs are"
        return None if used >= self.discrete else f"--require-discrete {self.discrete} is not met: {used} {gpus} used"

    def used(self) -> list[int]:
        """Indices of the devices, the one that trains first."""
        used = self.devices()["used"]
        if not used:
            raise NotRun("there is no device (check 1)")
        return used

    def adapter(self, index: int) -> dict[str, Any]:
        """A device's facts by its index."""
        return self.devices()["devices"][index]

    def generation(self, index: int) -> dict[str, Any]:
        """The checkpoint imported on a device, and what the packed model generates there; `arrays` has the logits."""
        return self._once(f"generate-{index}", lambda: self._generate(index))

    def training(self) -> Training:
        """The fine-tuning run, however it ended."""
        kinds = {index: self.adapter(index)["kind"] for index in self.used()}
        return self._once("training", lambda: train(self.children, self.recipe, self.args, self.run, kinds))

    def trained(self) -> Training:
        """The fine-tuning run, which ended well. Raises NotRun where it did not."""
        training = self.training()
        if training.code:
            raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
        return training

    def seen_rows(self) -> tuple[int, int]:
        """How many of the held-out rows are training rows too, and how many there are."""
        assert self.args.data
        return self._once("seen", lambda: seen_rows(*map(Path, _files(self.args))))

    def answers(self, name: str, adapter: str | None) -> list[dict[str, Any]]:
        """Answers to the held-out requests with an adapter, and their checks' verdicts."""
        where = {"device": self.used()[0], "adapter": adapter, "allow_unconfined": self.allow_unconfined}
        return self._once(name, lambda: self.children.run(name, "proof-answers", options=self.options(), **where))

    def _generate(self, index: int) -> dict[str, Any]:
        packed, arrays = self.out / "work" / f"packed-{index}", self.out / "work" / f"logits-{index}.npz"
        self.children.run(f"import-{index}", "import", model=self.args.model, output=str(packed), device=index)
        generated = {"options": self.options(model=str(packed)), "device": index, "arrays": str(arrays)}
        return self.children.run(f"generate-{index}", "proof-generate", **generated) | {"arrays": str(arrays)}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once. Its failure is the first asker's; the others could not run."""
        if name not in self._made:
            try:
                self._made[name] = make()
            except WorkerFailed as error:
                self._made[name] = error
                raise
        elif isinstance(self._made[name], WorkerFailed):
            raise NotRun(f"it needs what failed before: {self._made[name]}")
        return self._made[name]


def read_recipe(recipe: str) -> tuple[TrainingArguments, Path]:
    """A recipe's options and path.

    Raises:
        UserError: it cannot be read, or is none to prove anything by.
    """
    args, path = gather({}, recipe, "The command line")
    assert path
    args = with_demo_data(args)
    assert args.data
    files = _files(args)
    if len(files) < 2:
        raise UserError(f"The recipe {path} has no held-out data, which a proof needs: give it eval_data.")
    if args.base_dtype != DEFAULT_FORMAT:
        proven, kept = DEFAULT_FORMAT.upper(), args.base_dtype
        raise UserError(f"The recipe {path} keeps the base in {kept}: a proof is of {proven}, so leave it out.")
    resolve_model(args.model or "demo")
    return replace(args, data=files[0], split=None, eval_data=files[1], eval_split=None, resume=False), path


def _files(args: TrainingArguments) -> list[str]:
    """The files that a run trains on and holds out. Raises UserError where they are no files."""
    assert args.data
    sources = training_data(args.data, args.eval_data, split=args.split, eval_split=args.eval_split)
    for source in sources:
        if source and not isinstance(source, FileSource):
            raise UserError(f"A proof reads files, and {source.path} is a data set: save it as one.")
    return [source.path for source in sources if source]
