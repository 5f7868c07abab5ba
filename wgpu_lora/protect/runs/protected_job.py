"""A job: what a protected run trains on, to whom its results are sealed, and with what options, from JOB.toml.

    [protected]
    data = "train.jsonl.age"          # sealed, as are eval_data and init_adapter (adapter.tar.age), if given
    output = "run"
    recipients = ["age1..."]          # the data key's own among them
    broker = "https://broker.example:8443"   # or files = "exchange", for releases by files
    broker_key = "broker.pub"

    [training]                        # the options of a recipe file
    recipe = "qlora"
    max_steps = 500

Relative paths are relative to the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import asset_dir
from wgpu_lora.files.atomic import file_digest, sha256
from wgpu_lora.files.json_files import parse_toml, small_file, to_json
from wgpu_lora.files.paths import check_path, is_name
from wgpu_lora.files.typed_json import Check, Text, read_as
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.names.spelling import IN_FILE, flag, naming
from wgpu_lora.protect.sealed.age_streams import parse_recipients
from wgpu_lora.protect.sealed.keys import PublicKey
from wgpu_lora.protect.sealed.sealed_files import ARCHIVE, SealRecord, record_path
from wgpu_lora.train.options.training_arguments import (
    CHANGEABLE_ON_RESUME,
    PATHS,
    TrainingArguments,
    from_values,
    named,
)  # fmt: skip
from wgpu_lora.train.resolve_options import find_recipe, recipe_arguments

MAX_NAME = 100
SEALED = {"data": ".jsonl.age", "eval_data": ".jsonl.age", "init_adapter": ARCHIVE}  # options of sealed files
# Options that name models and adapters in the clear, which decide about what is learnt as the data do.
OTHER_MODELS = ("reference_adapter", "teacher", "teacher_adapter")
# Options that would read rows from elsewhere, or write or send what is learnt from them in the clear.
REFUSED = {
    **dict.fromkeys(("split", "eval_split", "dataset_config"), "rows come from a sealed file, not from a dataset"),
    **dict.fromkeys(
        ("teacher_cache", "eval_teacher_cache"),
        "its answers to the rows would lie on the disk in the clear: use a live teacher",
    ),
    "report_to": "trackers would send facts of the run elsewhere",
    **dict.fromkeys(("output", *SEALED), "it belongs into [protected]"),
    "resume": "it is given on the command line",
    "overwrite": "its evidence is never removed",
}
LOCAL = {*PATHS, *CHANGEABLE_ON_RESUME}  # options of this machine, which claims leave out
Name = Annotated[Text, Check(is_name, "UTF-8 text without NUL")]
Label = Annotated[
    Name,
    Check(
        lambda text: text.isprintable() and len(text) <= MAX_NAME, f"printable text of at most {MAX_NAME} characters"
    ),
]


@dataclass(frozen=True)
class _JobTable:
    """[protected], as it is written."""

    data: Name
    output: Name
    recipients: list[str]
    broker_key: Name
    name: Label | None = None
    eval_data: Name | None = None
    init_adapter: Name | None = None
    broker: Name | None = None
    files: Name | None = None
    ca: Name | None = None


@dataclass(frozen=True)
class _JobFile:
    protected: _JobTable
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProtectedJob:
    """A job that has been read and checked.

    Attributes:
        path: of its file. content: the file's bytes, and as a comment options from elsewhere: of a recipe file that is
            not a bundled one, and of the command line. name: the file's stem, if it states none.
        sealed: the sealed files by their options. output: the run's directory.
        recipients: to whom checkpoints and results are sealed.
        broker: its URL; ca: certificates for it. files: a directory to exchange files with a broker out of reach.
        broker_key: what signs releases, read from broker_file.
        arguments: the options of the training. stated: those of them that the job states.
    """

    path: Path
    content: bytes
    name: str
    sealed: Mapping[str, Path]
    output: Path
    recipients: tuple[str, ...]
    broker_key: PublicKey
    broker_file: Path
    arguments: TrainingArguments
    stated: Mapping[str, Any]
    broker: str | None
    files: Path | None
    ca: Path | None

    @property
    def sha256(self) -> str:
        """Of the content, in hexadecimal."""
        return sha256(self.content)

    @property
    def recipe_sha256(self) -> str:
        """Of the stated options that affect what is trained, as JSON with sorted keys; in hexadecimal."""
        options = {name: value for name, value in sorted(self.stated.items()) if name not in CHANGEABLE_ON_RESUME}
        return sha256(to_json(options).encode())

    @property
    def options(self) -> dict[str, Any]:
        """All options of the training but those of this machine, as claims and the evidence log state them."""
        return {name: value for name, value in self.arguments.as_dict().items() if name not in LOCAL}

    def other_models(self) -> dict[str, Path]:
        """Models and adapters beside the base, by their options."""
        locations = {name: getattr(self.arguments, name) for name in OTHER_MODELS}
        return {name: resolve_model(at) if name == "teacher" else Path(at) for name, at in locations.items() if at}

    def digests(self) -> dict[str, dict[str, Any]]:
        """Of each sealed file, and each model and adapter beside the base, by role: name, sha256, bytes and rows.

        Raises:
            UserError: a file cannot be read, is not the one that its record is about, or not on this machine.
        """
        sealed = {role: sealed_facts(path) for role, path in self.sealed.items()}
        return sealed | {name: model_facts(name, path) for name, path in self.other_models().items()}

    def with_options(self, options: Mapping[str, Any]) -> ProtectedJob:
        """The job with options of the command line or Python over its own. Raises UserError if one is not allowed."""
        if not options:
            return self
        where, values = "The command line", named(options, "The command line")
        for name in REFUSED:
            if name in values:
                raise UserError(f"{flag(name)} cannot be given beside a protected job: {REFUSED[name]}.")
        arguments = from_values(values, where, self.arguments)
        _check(arguments, where)
        content = _with_comment(self.content, "of the command line", values)
        return replace(self, content=content, arguments=arguments, stated={**self.stated, **values})


def read_job(path: str | Path) -> ProtectedJob:
    """Read JOB.toml.

    Raises:
        UserError: it cannot be read, a key is unknown, missing or invalid, or an option does not go with sealed data.
    """
    path = Path(path)
    check_path(path)
    content, where = small_file(path, "The job"), f"The job {path}"  # read once: what is attested is what is run
    file = read_as(_JobFile, parse_toml(content, where), where)
    table = file.protected
    parse_recipients(table.recipients)
    arguments, explicit, of_recipe = _options(dict(file.training), path, f"{where}, [training]")
    sealed = {}
    for option, suffix in SEALED.items():
        if value := getattr(table, option):
            sealed[option] = _sealed_path(path.parent / value, option, suffix, where)
    if (table.broker is None) == (table.files is None):
        count_word = "both" if table.broker else "neither"
        raise UserError(
            f"{where} has {count_word} of 'broker' and 'files': give the broker's URL, or a directory for releases by "
            "files."
        )
    output, broker_file = path.parent / table.output, path.parent / table.broker_key
    with naming(IN_FILE):
        paths: dict[str, Any] = {"output": str(output), **{name: str(at) for name, at in sealed.items()}}
        # The default depends on the model's size, and policies limit what a job says.
        arguments = replace(arguments, learning_rate=arguments.rate, **paths)
        _check(arguments, where)
    return ProtectedJob(
        path=path,
        content=_with_comment(content, "of its recipe file", of_recipe),
        name=table.name or path.stem,
        sealed=sealed,
        output=output,
        recipients=tuple(dict.fromkeys(table.recipients)),
        broker_key=PublicKey.read(broker_file),
        broker_file=broker_file,
        arguments=arguments,
        stated=explicit,
        broker=table.broker,
        files=path.parent / table.files if table.files else None,
        ca=path.parent / table.ca if table.ca else None,
    )


def _sealed_path(path: Path, option: str, suffix: str, where: str) -> Path:
    """Raises UserError unless there is such a sealed file."""
    check_path(path)
    if not path.name.endswith(suffix):
        raise UserError(
            f"{where}: '{option}' in [protected] is {path.name}, but must be a sealed file named *{suffix}: "
            "seal it with wgpu-lora protect seal."
        )
    if not path.is_file():
        raise UserError(f"{where}: {path} does not exist, or is not a file: correct '{option}' in [protected].")
    return path


def _with_comment(content: bytes, source: str, values: Mapping[str, Any]) -> bytes:
    """A job's content with options from elsewhere, so that whoever allows its digest allows them, too."""
    options = {name: value for name, value in sorted(values.items()) if name not in LOCAL}
    return content + f"\n# Options {source}: {to_json(options)}\n".encode() if options else content


def _options(
    values: dict[str, Any], path: Path, where: str
) -> tuple[TrainingArguments, dict[str, Any], dict[str, Any]]:
    """[training]: options over those of its recipe, those that are stated, and those of a recipe file."""
    defaults = TrainingArguments()
    base, explicit, of_file = defaults, dict[str, Any](), dict[str, Any]()
    with naming(IN_FILE):
        recipe = values.pop("recipe", None)
        if recipe is not None:
            if not isinstance(recipe, str):
                raise UserError(f"{where}: recipe must be the name of a recipe or a file, not {recipe!a:.60}.")
            local_file = path.parent / recipe
            recipe_file = local_file if local_file.is_file() else find_recipe(recipe)
            base = recipe_arguments(recipe_file)
            if base.init_adapter:
                raise UserError(
                    f"{where}: the recipe {recipe} has an init_adapter: seal it, and name it in [protected]."
                )
            base = replace(base, data=None, eval_data=None, output=None)  # of another run on other data
            explicit = {name: value for name, value in base.as_dict().items() if value != defaults.as_dict()[name]}
            for name in ("data", "eval_data", "output"):
                explicit.pop(name, None)
            if recipe_file.parent != asset_dir("recipes"):  # which the package's digest covers
                of_file = dict(explicit)
        options = named(values, where)
        for name in REFUSED:
            if name in options:
                raise UserError(f"{where}: {name} cannot be given here: {REFUSED[name]}.")
        for name in PATHS:
            if isinstance(named_path := options.get(name), str) and (path.parent / named_path).exists():
                options[name] = str(path.parent / named_path)
        return from_values(options, where, base), {**explicit, **options}, of_file


def _check(args: TrainingArguments, where: str) -> None:
    """Raise UserError for options that do not keep what is learnt sealed."""
    defaults = TrainingArguments()
    for name, reason in REFUSED.items():
        if name not in ("output", "resume", *SEALED) and getattr(args, name) != getattr(defaults, name):
            raise UserError(f"{where}: {flag(name)} cannot be used in a protected run: {reason}.")
    if args.train == "quant-scales":
        raise UserError(f"{where}: a protected run trains an adapter, not the base: leave {flag('train')} out.")


# -- digests -----------------------------------------------------------------------------------------------------------


def sealed_facts(path: Path) -> dict[str, Any]:
    """Of a sealed file: name, sha256, bytes and, if its record states them, rows.

    Raises:
        UserError: it cannot be read, or is not the one that its record is about.
    """
    facts, record_file = _facts(path), record_path(path)
    if record_file.exists():
        record = SealRecord.read(record_file)
        if record.sha256 != facts["sha256"]:
            raise UserError(
                f"{path} is not the file that {record_file.name} is about: restore the file that was sealed."
            )
        if record.rows is not None:
            facts["rows"] = record.rows
    return facts


def model_facts(option: str, path: Path) -> dict[str, Any]:
    """Of a model or an adapter: name, bytes and sha256; of a directory, of the lines which sha256sum prints for it.

    Raises:
        UserError: it is not on this machine, or a file cannot be read.
    """
    if path.is_file():
        return _facts(path)
    if not path.is_dir():
        raise UserError(f"{flag(option)} {path} is not a directory here, so it cannot be attested: download it first.")
    files = {file.relative_to(path).as_posix(): _facts(file) for file in path.rglob("*") if file.is_file()}
    listing = "".join(f"{facts['sha256']}  {name}\n" for name, facts in sorted(files.items()))
    size = sum(facts["bytes"] for facts in files.values())
    return {"name": path.name, "sha256": sha256(listing.encode()), "bytes": size}


def _facts(path: Path) -> dict[str, Any]:
    try:
        return {"name": path.name, "sha256": file_digest(path), "bytes": path.stat().st_size}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
