"""Performance contracts of bricks: `bricks/NAME.toml` as validated dataclasses, and their formulas."""

from __future__ import annotations

import ast
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal, get_args

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import asset_dir
from wgpu_lora.files.typed_json import Positive, Scale, Text, read_as
from wgpu_lora.models.model_config import ModelConfig

Kind = Literal["training", "serving"]
DeviceClass = Literal["discrete", "integrated", "software"]
Option = Literal["layers", "tokens", "rank", "base_dtype", "compute_dtype", "tune"]
OPTIONS: tuple[str, ...] = get_args(Option)
# Of formulas.
ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.And,
)  # fmt: skip
FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil}


@dataclass(frozen=True)
class Work:
    """Useful operations of a run, and bytes that it must move at least, as formulas over the dims."""

    operations: Text
    bytes: Text


@dataclass(frozen=True)
class Accuracy:
    """The largest normalised mean squared error of a kernel relative to its float64 reference."""

    nmse: Scale


@dataclass(frozen=True)
class Measure:
    """`warmup` untimed runs, then at least `iterations`, until their times' CV is below `cv` or `seconds` are over."""

    warmup: Positive = 3
    iterations: Positive = 5
    cv: Scale = 0.05
    seconds: Scale = 10.0


@dataclass(frozen=True)
class Budget:
    """The least share of a ceiling that must be reached, by class of device; None requires nothing.

    of: fma or decode_fma (operations per second), bandwidth (bytes per second), floor (the time that fma or bandwidth
    allow, whichever is longer) or lower (the same with decode_fma).
    when: the condition under which it applies, a comparison of dims, config keys and the run's own keys.
    """

    of: Literal["fma", "bandwidth", "decode_fma", "lower", "floor"]
    discrete: Scale | None = None
    integrated: Scale | None = None
    software: Scale | None = None
    when: Text = "1"

    def share(self, device_class: str) -> float | None:
        return getattr(self, device_class) if device_class in get_args(DeviceClass) else None


@dataclass(frozen=True)
class Bound:
    """An absolute limit of a figure of the result, if `when` holds, on one class of device or on all."""

    metric: Text
    at_most: Scale | None = None
    at_least: Scale | None = None
    device: DeviceClass | None = None
    when: Text = "1"


@dataclass
class Contract:
    """covers: what is measured. dims: short names -> expressions over config keys and the run's own keys.

    options: those that affect the brick; others are refused.
    """

    name: str = field(init=False)
    covers: Text
    kind: Kind
    options: tuple[Option, ...]
    dims: dict[str, Text]
    work: Work
    budget: Budget
    measure: Measure = field(default_factory=Measure)
    accuracy: Accuracy | None = None
    bounds: tuple[Bound, ...] = ()

    def values(self, keys: Mapping[str, float]) -> dict[str, float]:
        """The dims of a run. Raises UserError if a name is unknown."""
        return {dim: self._evaluate(f"dims.{dim}", text, keys) for dim, text in self.dims.items()}

    def operations(self, dims: Mapping[str, float]) -> float:
        return self._evaluate("work.operations", self.work.operations, dims)

    def bytes(self, dims: Mapping[str, float]) -> float:
        return self._evaluate("work.bytes", self.work.bytes, dims)

    def applies(self, condition: str, names: Mapping[str, float]) -> bool:
        return bool(self._evaluate("when", condition, names))

    def _evaluate(self, key: str, text: str, names: Mapping[str, float]) -> float:
        return evaluate(text, names, f"bricks/{self.name}.toml: {key}")

    @classmethod
    def parse(cls, name: str, text: str) -> Contract:
        """Read a contract. Raises UserError if a key is unknown or missing, or a value has the wrong type."""
        where = f"bricks/{name}.toml"
        try:
            contract = read_as(cls, tomllib.loads(text), where)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{where} is not valid TOML ({error}): correct it.") from None
        contract.name = name
        for bound in contract.bounds:
            if (bound.at_most is None) == (bound.at_least is None):
                raise UserError(f"{where}: the bound of {bound.metric} needs one of at_most and at_least.")
        ones = dict.fromkeys(contract.dims, 1.0)
        contract.operations(ones)
        contract.bytes(ones)
        return contract


def brick_names() -> list[str]:
    """All bricks, those of training first."""
    names = sorted(path.stem for path in asset_dir("bricks").glob("*.toml"))
    return sorted(names, key=lambda name: get_args(Kind).index(load_contract(name).kind))


@cache
def load_contract(name: str) -> Contract:
    """The contract of a brick. Raises UserError, which lists all bricks, if the name is unknown."""
    path = asset_dir("bricks") / f"{name}.toml"
    if path not in asset_dir("bricks").glob("*.toml"):
        raise UserError(f"The brick {name!r} is not known: choose one of {', '.join(brick_names())}.")
    return Contract.parse(name, path.read_text(encoding="utf-8"))


def evaluate(expression: str, names: Mapping[str, float], where: str) -> float:
    """The value of an expression such as `2 * T * H`; comparisons give 0 or 1.

    Args:
        names: the values of names.
        where: brick and key, which begin error messages.

    Raises:
        UserError: it is not such an expression, has no value, or a name is unknown.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        for node in ast.walk(tree):
            number = not isinstance(node, ast.Constant) or type(node.value) in (int, float)
            if not (number and isinstance(node, ALLOWED)):
                raise SyntaxError
        return float(eval(compile(tree, where, "eval"), {"__builtins__": {}, **FUNCTIONS}, dict(names)))
    except NameError as error:
        valid = ", ".join(sorted(names))
        raise UserError(f"{where} uses the name {error.name}, which is not known: use one of {valid}.") from None
    except SyntaxError:
        raise UserError(f"{where} is {expression!r}, which is not an arithmetic expression: correct it.") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{where} is {expression!r}, which has no value ({error}): correct it.") from None


def numbers_of(config: ModelConfig) -> dict[str, float]:
    """The numbers of a config by their names in config.json, and these of its layers:

    linear_weights: values of all linear layers; matrix_weights: of those that are stored in the base format.
    linear_sizes: inputs and outputs of all linear layers.
    first_modules, first_outputs: of those that read the embedding, which need no gradient of their inputs.
    attention_layers: layers with a key-value cache.
    state_values: values of the matrices that delta nets keep of a sequence, of all layers.
    """
    first = [path for path in config.lora_modules if _attends(config, path)][:-1]
    caches = [config.cache(layer) for layer in range(config.num_hidden_layers)]
    of_sequences = [[item for item in cache.values() if item.per_sequence] for cache in caches]
    layer_numbers = {
        "linear_weights": sum(prod(shape) for shape in config.lora_modules.values()),
        "matrix_weights": sum(prod(shape) for shape in config.matrices().values()),
        "linear_sizes": sum(sum(shape) for shape in config.lora_modules.values()),
        "first_modules": len(first),
        "first_outputs": sum(config.lora_modules[path][0] for path in first),
        "attention_layers": sum(not items for items in of_sequences),
        "state_values": sum(prod(cache["state"].shape) for cache in caches if "state" in cache),
    }
    numbers = {name: value for name, value in vars(config).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in {**numbers, **layer_numbers}.items()}


def _attends(config: ModelConfig, path: str) -> bool:
    """Whether a module is of the first layer's attention, or of what it has instead; its last one is the output."""
    return path.startswith(f"{config.path(0)}.") and config.layer_part(path) == "attention"
