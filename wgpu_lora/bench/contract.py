"""A brick's performance contract: `bricks/NAME.toml`, read into validated dataclasses."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any

from wgpu_lora.assets import asset_dir
from wgpu_lora.bench.formula import evaluate
from wgpu_lora.errors import UserError
from wgpu_lora.models.config import ModelConfig

KINDS = ("training", "serving")
CLASSES = ("discrete", "integrated", "software")
CEILINGS = ("fma", "bandwidth", "decode_fma", "lower", "floor")
OPTIONS = ("layers", "tokens", "rank", "base_dtype", "compute_dtype", "tune")


@dataclass(frozen=True)
class Work:
    """What a run does, as formulas over the dims: useful operations, and bytes that must pass through memory."""

    operations: str
    bytes: str


@dataclass(frozen=True)
class Accuracy:
    """The largest normalised mean squared error of any kernel against its float64 reference."""

    nmse: float


@dataclass(frozen=True)
class Measure:
    """Untimed runs first; then `iterations` at least, until the timings' CV is under `cv` or `seconds` have passed."""

    warmup: int = 3
    iterations: int = 5
    cv: float = 0.05
    seconds: float = 10.0


@dataclass(frozen=True)
class Budget:
    """The least share of a ceiling that must be reached, by class of device; None asks for nothing.

    of: fma or decode_fma (operations a second), bandwidth (bytes a second), floor (the larger of operations over fma
    and bytes over bandwidth, over the measured seconds) or lower (the same with decode_fma).
    when: what it is meant for, a comparison of dims, config keys and the run's own keys.
    """

    of: str
    discrete: float | None = None
    integrated: float | None = None
    software: float | None = None
    when: str = "1"

    def share(self, device_class: str) -> float | None:
        return {"discrete": self.discrete, "integrated": self.integrated, "software": self.software}.get(device_class)


@dataclass(frozen=True)
class Bound:
    """An absolute limit of one figure of the result, where `when` holds and, if `device` is given, on that class."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None
    device: str | None = None
    when: str = "1"


@dataclass(frozen=True)
class Contract:
    """`covers` says what is measured. dims: short names -> expressions over config keys and the run's own keys.

    options: those of OPTIONS that change what is measured; any other would do nothing.
    """

    name: str
    covers: str
    kind: str
    options: tuple[str, ...]
    dims: Mapping[str, str]
    work: Work
    budget: Budget
    measure: Measure = field(default_factory=Measure)
    accuracy: Accuracy | None = None
    bounds: tuple[Bound, ...] = ()

    def values(self, keys: Mapping[str, float]) -> dict[str, float]:
        """The dims of a run. Raises UserError for a name that is not known."""
        return {dim: evaluate(text, keys, f"{self._file}: dims.{dim}") for dim, text in self.dims.items()}

    def operations(self, dims: Mapping[str, float]) -> float:
        return evaluate(self.work.operations, dims, f"{self._file}: work.operations")

    def bytes(self, dims: Mapping[str, float]) -> float:
        return evaluate(self.work.bytes, dims, f"{self._file}: work.bytes")

    def applies(self, when: str, names: Mapping[str, float]) -> bool:
        return bool(evaluate(when, names, f"{self._file}: when"))

    @property
    def _file(self) -> str:
        return f"bricks/{self.name}.toml"

    @classmethod
    def parse(cls, name: str, text: str) -> Contract:
        """Reads a contract's text. Raises UserError for a key that is not known, missing, or of the wrong kind."""
        where = f"bricks/{name}.toml"
        try:
            d = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{where} is not valid TOML ({error}): correct it.") from None
        _check_keys(cls, d, where, given=("name",))
        dims = _strings(d["dims"], f"{where}: dims")
        parts = {
            "work": _part(Work, d["work"], f"{where}: work"),
            "budget": _part(Budget, d["budget"], f"{where}: budget"),
            "measure": _part(Measure, d.get("measure", {}), f"{where}: measure"),
            "accuracy": _part(Accuracy, d["accuracy"], f"{where}: accuracy") if "accuracy" in d else None,
            "bounds": tuple(
                _part(Bound, bound, f"{where}: bounds")
                for bound in _list(d.get("bounds", []), f"{where}: bounds", "[[bounds]] tables")
            ),
        }
        words = (_text(d["covers"], where), _text(d["kind"], where))
        options = tuple(_text(name, f"{where}: options") for name in _list(d["options"], f"{where}: options", "names"))
        contract = cls(name, *words, options, dims, **parts)
        contract._check()
        return contract

    def _check(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"{self._file}: kind is {self.kind!r}: use one of {', '.join(KINDS)}.")
        if unknown := set(self.options) - set(OPTIONS):
            raise UserError(f"{self._file}: options has {', '.join(sorted(unknown))}: use {', '.join(OPTIONS)}.")
        if self.budget.of not in CEILINGS:
            raise UserError(f"{self._file}: budget.of is {self.budget.of!r}: use one of {', '.join(CEILINGS)}.")
        for bound in self.bounds:
            if bound.device not in (None, *CLASSES):
                raise UserError(f"{self._file}: device is {bound.device!r}: use one of {', '.join(CLASSES)}.")
            if (bound.at_most is None) == (bound.at_least is None):
                raise UserError(f"{self._file}: the bound of {bound.metric} needs one of at_most and at_least.")
        ones = dict.fromkeys(self.dims, 1.0)
        self.operations(ones)
        self.bytes(ones)


def brick_names() -> list[str]:
    """Every brick that has a contract, training first."""
    names = sorted(path.stem for path in asset_dir("bricks").glob("*.toml"))
    return sorted(names, key=lambda name: (KINDS.index(load_contract(name).kind), name))


@cache
def load_contract(name: str) -> Contract:
    """The contract of a brick. Raises UserError, with those that exist, for a name that is not known."""
    path = asset_dir("bricks") / f"{name}.toml"
    known = {p.stem for p in asset_dir("bricks").glob("*.toml")}
    if name not in known:
        raise UserError(f"The brick {name!r} is not known: choose one of {', '.join(brick_names())}.")
    return Contract.parse(name, path.read_text(encoding="utf-8"))


def numbers_of(config: ModelConfig) -> dict[str, float]:
    """What of a config dims may use: its numbers, by their names."""
    return {name: float(value) for name, value in vars(config).items() if isinstance(value, int | float)}


def _part(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}, expected a table: correct it.")
    _check_keys(kind, value, where)
    for f in fields(kind):
        if f.name in value:
            _check_value(str(f.type), value[f.name], f"{where}.{f.name}")
    return kind(**value)


def _check_keys(kind: type, value: Mapping[str, Any], where: str, given: tuple[str, ...] = ()) -> None:
    known = {f.name: f for f in fields(kind) if f.name not in given}
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{where} has the key {key}, which is not known{hint}: use {', '.join(known)}.")
    for key, f in known.items():
        if key not in value and f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{where} lacks the key {key}: add it.")


def _check_value(kind: str, value: Any, where: str) -> None:
    if kind.startswith("str"):
        _text(value, where)
        return
    number = isinstance(value, int) or (isinstance(value, float) and kind.startswith("float"))
    if isinstance(value, bool) or not number or not 0 < value < float("inf"):
        raise UserError(f"{where} is {value!r}, expected a positive number: correct it.")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where} holds {value!r} where words are expected: correct it.")
    return value


def _strings(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}, expected a table: correct it.")
    return {key: _text(text, f"{where}.{key}") for key, text in value.items()}


def _list(value: Any, where: str, of: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where} is {value!r}, expected {of}: correct it.")
    return value
