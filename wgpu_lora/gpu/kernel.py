"""A kernel's declaration: the signature is the binding table, the docstring the formula, the body the reference.

    @kernel("rmsnorm_forward.wgsl.j2", grid=lambda c: one_per(c.rows, 1))
    def rmsnorm_forward(x: In, weight: ReadOnly, y: Out, *, rows: U32, cols: U32, eps: F32):
        '''y[r] = x[r] * weight / sqrt(mean(x[r]^2) + eps)'''
        return x / np.sqrt(...) * weight

Positional parameters are storage bindings, in order. `In`, `Out` and `InOut` may be in arenas and are declared
`read_write` in WGSL, because tensors that share an arena's buffer may not mix access modes in one dispatch. `ReadOnly`
(weights, tables, a step's inputs) is `read`. A parameter with the default None is optional, and so is its binding.

Keyword parameters become constants of the shader, except for `Dim`s, which are passed in a uniform buffer `dims` whose
binding follows the storage bindings. The reference returns its `Out` and `InOut` arrays in order, computed in float64
from the formula.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import jinja2
from jinja2.bccache import Bucket

from wgpu_lora.files.assets import asset_dir, shader_text
from wgpu_lora.gpu.reference_values import TakePart
from wgpu_lora.gpu.struct import wgsl_struct
from wgpu_lora.gpu.tiling import Capabilities, Constants, Tiling, Tunable

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device


In = Annotated[Any, "in"]
Out = Annotated[Any, "out"]
InOut = Annotated[Any, "inout"]
ReadOnly = Annotated[Any, "fixed"]
U32 = Annotated[int, "u32"]
I32 = Annotated[int, "i32"]
F32 = Annotated[float, "f32"]
Flag = Annotated[bool, "bool"]
Word = Annotated[str, "word"]  # for templates only, such as an element type
Dim = Annotated[int, "dim"]  # a u32 of the uniform `dims`, so that shapes share one compute pipeline
T = TypeVar("T")
Offset = Annotated[T, "offset"]  # Offset[Dim]: such as a first row; calls that differ in it are alike

ACCESS = {"in": "read_write", "out": "read_write", "inout": "read_write", "fixed": "read"}
BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<storage,\s*(read|read_write)>\s*(\w+)\s*:\s*([^;]+);")
CONSTANT = re.compile(r"^const (\w+): (u32|f32|bool) = ([^;]+);", re.MULTILINE)

REGISTRY: dict[str, Kernel] = {}
Grid = tuple[int, int, int]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


LINEAR_X = 32768  # workgroups in x before a linear grid continues in y, as in lib/linear.wgsl


def linear_grid(items: int, per_group: int = 64) -> Grid:
    """A linear grid with one workgroup per `per_group` items, folded into two dimensions if it is long."""
    groups = max(1, cdiv(items, per_group))
    return (groups, 1, 1) if groups <= LINEAR_X else (LINEAR_X, cdiv(groups, LINEAR_X), 1)


Variants = Callable[[Capabilities, Any], Sequence[Tiling]]
TakeLayout = Callable[[Constants, Sequence[str], Sequence[str], Tiling], Any]


def only_one(capabilities: Capabilities, c: Any) -> Sequence[Tiling]:
    """The tilings of a kernel without variants."""
    return (Tiling(),)


@dataclass(frozen=True)
class Kernel:
    """A declared kernel. Calling it computes the float64 reference."""

    name: str
    file: str
    grid: Callable[[Any], Grid]
    reference: Callable[..., Any]
    lib: tuple[str, ...] = ()
    structs: tuple[type, ...] = ()
    variants: Variants = only_one
    specialise: Callable[[Any], dict[str, Any]] | None = None
    layout: TakeLayout | None = None
    tuning: Tunable | None = None
    part: TakePart | None = None
    bindings: dict[str, str] = field(default_factory=dict)  # parameter -> in | out | inout | fixed
    optional: frozenset[str] = frozenset()
    constants: dict[str, str] = field(default_factory=dict)  # parameter -> u32 | f32 | bool | word | dim
    defaults: dict[str, Any] = field(default_factory=dict)
    offsets: frozenset[str] = frozenset()  # constants that are an `Offset`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(n for n, kind in self.bindings.items() if kind in ("out", "inout"))

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The parameters passed in the uniform buffer, in order."""
        return tuple(n for n, kind in self.constants.items() if kind == "dim")

    def compiled_in(self, constants: Constants) -> Constants:
        """The constants a compute pipeline depends on: all but the dims, and what `specialise` derives from those."""
        result = {n: v for n, v in constants.items() if n not in self.dims}
        return result | (self.specialise(SimpleNamespace(**constants)) if self.specialise else {})

    def source(self, present: Sequence[str], constants: Constants, tiling: Tiling) -> str:
        """The assembled WGSL: structs, library files, then the kernel with its constants substituted.

        A template gets the constants by name, the tiling as `tile`, binding numbers as `bind` and the dims' names as
        `dims`, and the kernel's `layout`. Raises TypeError if the WGSL's bindings do not match the signature.
        """
        values = self.compiled_in(constants)
        if self.file.endswith(".j2"):
            bind = {n: i for i, n in enumerate([*present, "dims"])}
            if self.layout:
                values["layout"] = self.layout(values, present, self.dims, tiling)
            text = _environment().get_template(self.file).render(bind=bind, tile=tiling, dims=self.dims, **values)
        else:
            text = shader_text(self.file)
        front = [*map(wgsl_struct, self.structs), *(shader_text(f"lib/{name}.wgsl") for name in self.lib)]
        text = "\n".join([*front, text])

        def value(match: re.Match[str]) -> str:
            name, kind = match[1], match[2]
            if name.lower() not in values:
                return match[0]
            return f"const {name}: {kind} = {literal(kind, values[name.lower()])};"

        text = CONSTANT.sub(value, text)
        self._check(text, present)
        return text

    def _check(self, text: str, present: Sequence[str]) -> None:
        declared = [(int(i), access, name) for i, access, name, _ in BINDING.findall(text)]
        expected = [(i, ACCESS[self.bindings[n]], n) for i, n in enumerate(present)]
        if sorted(declared) != expected:
            raise TypeError(
                f"{self.file} declares the bindings {sorted(declared)}, but the signature of {self.name} has {expected}"
            )

    def compute_pipeline(self, device: Device, present: tuple[str, ...], constants: Constants, tiling: Tiling) -> Any:
        """The compute pipeline of a call with the bindings `present`. Raises ShaderError."""
        compiled = self.compiled_in(constants)
        key = (self.name, present, tuple(sorted(compiled.items())), tiling)
        return device.compute_pipeline(key, lambda: self.source(present, constants, tiling))

    def tilings(self, capabilities: Capabilities, constants: Constants) -> Sequence[Tiling]:
        """The tilings that can run this call, the default first."""
        return self.variants(capabilities, SimpleNamespace(**{**self.defaults, **constants}))

    def groups(self, constants: Constants, tiling: Tiling) -> Grid:
        return self.grid(SimpleNamespace(**constants, tile=tiling))


def literal(kind: str, value: Any) -> str:
    """A WGSL literal of the type `kind`: bool, u32 or f32."""
    if kind == "bool":
        return "true" if value else "false"
    return (
        f"{int(value)}u"
        if kind == "u32"
        else f"{float(value)!r}f"
        if "e" not in repr(float(value))
        else f"{float(value):.17g}f"
    )


@cache
def _environment() -> jinja2.Environment:
    folder = Path(cache_from_source(__file__)).parent
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(asset_dir("shaders")),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        bytecode_cache=CompiledTemplates(str(folder)),
    )


class CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Compiled templates, stored beside the compiled modules of Python where that folder can be written."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


def kernel(
    file: str,
    *,
    grid: Callable[[Any], Grid],
    lib: tuple[str, ...] = (),
    structs: tuple[type, ...] = (),
    variants: Variants = only_one,
    specialise: Callable[[Any], dict[str, Any]] | None = None,
    layout: TakeLayout | None = None,
    tuning: Tunable | None = None,
    part: TakePart | None = None,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares a kernel (see the module's docstring).

    Args:
        file: a WGSL file or `.wgsl.j2` template in `shaders/`.
        grid: (constants, and the tiling as `tile`) -> workgroups.
        lib: files of `shaders/lib/` to prepend.
        structs: dataclasses whose WGSL declarations are prepended (see `gpu.struct`).
        variants: (a device's capabilities, a call's constants) -> the tilings that can run it, the default first.
        specialise: constants -> facts that a template derives from the dims, such as whether rows are whole vec4s.
        layout: (compiled constants, bindings, names of the dims, tiling) -> what a template reads as `layout`.
        tuning: describes the kernel's calls to the tuner. Kernels without it are not tuned.
        part: (arrays, constants) -> the part of a large call to check (see `gpu.reference_values`).
    """

    def declare(function: Callable[..., Any]) -> Kernel:
        hints = typing.get_type_hints(function, include_extras=True)
        bindings, constants, optional, defaults, offsets = {}, {}, set(), {}, set()
        for name, parameter in inspect.signature(function).parameters.items():
            kind = hints[name].__metadata__[0]
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                constants[name] = kind
                if "offset" in hints[name].__metadata__:
                    offsets.add(name)
                if parameter.default is not inspect.Parameter.empty:
                    defaults[name] = parameter.default
            else:
                bindings[name] = kind
                if parameter.default is None:
                    optional.add(name)
        declared = Kernel(
            function.__name__,
            file,
            grid,
            function,
            lib,
            structs,
            variants,
            specialise,
            layout,
            tuning,
            part,
            bindings,
            frozenset(optional),
            constants,
            defaults,
            frozenset(offsets),
        )
        assert declared.name not in REGISTRY, f"two kernels are named {declared.name}"
        REGISTRY[declared.name] = declared
        return declared

    return declare


def by_subgroup(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """One subgroup per row if the device has subgroups; one thread per row."""
    size = capabilities.subgroup_size
    return [Tiling("broadcast", size), Tiling()] if size >= 4 else [Tiling()]


def row_grid(rows: Callable[[Any], int]) -> Callable[[Any], Grid]:
    return lambda c: linear_grid(rows(c), 1 if c.tile.subgroup else c.tile.lanes)
