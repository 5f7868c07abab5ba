"""What the template of the matrix products derives from a call and a tiling: sizes, places and offsets, by name.

Sizes and offsets are WGSL expressions, since they are uniforms or, in a stack, variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wgpu_lora.gpu.tiling import Tiling

DENSE = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Left:
    """The operand whose rows are those of the tile, loaded as vec4s.

    quads: whether its rows are whole vec4s. size: values of a row, past which loads are zeros, unless the rounds are
    `whole`. row: offset of a row, or where the tile's rows are its columns, of a step.
    parameters, arguments: of its load function, besides row and step.
    slots: whether only the rows of the current slot are loaded, and others are zeros.
    """

    name: str
    type: str
    access: str
    quads: bool
    size: str
    row: str
    whole: bool
    parameters: str = ""
    arguments: str = ""
    slots: bool = False

    @property
    def half(self) -> bool:
        return self.type != "f32"

    def load(self, row: str, step: str) -> str:
        """Four values of a row."""
        load = f"load_{self.name}({row}, {step}{self.arguments})"
        return f"select(vec4<f32>(), {load}, {row} >= slot_first && {row} < slot_last)" if self.slots else load


@dataclass(frozen=True)
class Right:
    """A dense operand whose columns are those of the lanes.

    base: where its values begin. row: offset of a row. size: values along the contraction. last: past the last step.
    width: how many neighbouring columns a load gives, if its rows are across the contraction.
    """

    name: str
    type: str
    access: str
    quads: bool
    base: str
    row: str
    size: str
    last: str
    width: int

    @property
    def half(self) -> bool:
        return self.type != "f32"


@dataclass(frozen=True)
class Vector:
    """Columns first .. first + size - 1 of a lane, whose values are one register: 4 or, where a lane has fewer, all.

    suffix: of the names of such registers; empty if a lane has only one.
    """

    first: int
    size: int
    suffix: str

    @property
    def type(self) -> str:
        return "f32" if self.size == 1 else f"vec{self.size}<f32>"

    def of(self, value: str) -> str:
        """The vector of the values of its columns, whose numbers replace %d."""
        values = [value % (self.first + i) for i in range(self.size)]
        return values[0] if self.size == 1 else f"{self.type}({', '.join(values)})"


@dataclass(frozen=True)
class Word:
    """A word of the codes of eight neighbours, or of as many as a lane has, of a plane of `bits` bits a code.

    start: where the plane begins, before '+', in words of a row. number: among those words of the plane.
    inside: whether the codes may begin inside of the word.
    """

    plane: int
    bits: int
    start: str
    number: int
    inside: bool

    @property
    def name(self) -> str:
        return f"word{self.plane}_{self.number}"

    def row(self, column: str) -> str:
        """Its number in W's row that has the codes from `column` on."""
        return f"{self.start}{column} / {32 // self.bits}u" + (f" + {self.number}u" if self.number else "")

    def shift(self, column: str) -> str:
        """Shifts the code of `column` to the lowest bits."""
        return f" >> ({column} % {32 // self.bits}u * {self.bits}u)" if self.inside else ""


def words_of(planes: Sequence[int], count: int) -> tuple[Word, ...]:
    """The words that have the codes of `count` neighbours, of all planes."""
    result = []
    for plane, bits in enumerate(planes):
        start = "".join(f"(w.size_in * {before}u + 31u) / 32u + " for before in planes[:plane])
        for number in range(max(1, bits * count // 32)):
            result.append(Word(plane, bits, start, number, bits * count < 32))
    return tuple(result)


def vectors_of(columns: int) -> tuple[Vector, ...]:
    """The vectors of a lane's columns."""
    if columns <= 4:
        return (Vector(0, columns, ""),)
    return tuple(Vector(first, 4, f"_{first // 4}") for first in range(0, columns, 4))


@dataclass(frozen=True)
class Layout:
    """The layout of a product.

    across: whether the contraction is across the rows of both operands (tn), by slot.
    grouped: whether each slot has its own b. adapted: whether LoRA's second product is added.
    thin: whether the tile is one of y^T, so that lanes own y's rows, and b is the left operand.
    by_columns, by_steps: whether the parts of a stack are columns of y, or steps of the contraction.
    format, orientation: of the operand that lanes read by columns: nt if its rows are along the contraction, else nn.
    left_columns: whether the tile's rows are columns of the left operand.
    m, n, k: sizes of the tile's y, of the part if there are several.
    vectors: of a lane's columns. words: of a packed format, see operands/packed.wgsl.j2.
    y_row: offset of a row of y. bias: where a part's begins. matrix: a packed W (operands/packed.wgsl.j2).
    neighbours: columns of a lane that are side by side. pairs: whether they are by twos at least.
    """

    across: bool
    grouped: bool
    adapted: bool
    thin: bool
    gated: bool
    stacked: bool
    by_columns: bool
    by_steps: bool
    format: str
    orientation: str
    left_columns: bool
    m: str
    n: str
    k: str
    y_row: str
    bias: str
    codes: str
    scales: str
    matrix: str
    neighbours: int
    pairs: bool
    left: Left
    right: Right
    h: Left
    factor: Right
    words: tuple[Word, ...]
    vectors: tuple[Vector, ...]

    def element(self, column: int) -> str:
        """What follows a register's name for a single column."""
        vector = self.vectors[column // 4]
        return vector.suffix if vector.size == 1 else f"{vector.suffix}.{'xyzw'[column % 4]}"

    def bits(self, *place: int) -> str:
        """What `decode8` takes: the words at a place, one value or a vector."""
        names = ["_".join([word.name, *map(str, place)]) for word in self.words]
        return names[0] if len(names) == 1 else f"vec{len(names)}<u32>({', '.join(names)})"

    @property
    def own_columns(self) -> bool:
        """Whether a lane's columns are all side by side, as packed words have them."""
        return self.format == "packed" and self.orientation == "nn"


def product_layout(c: Mapping[str, Any], present: Sequence[str], dims: Sequence[str], tile: Tiling) -> Layout:
    """The layout of a call with these constants, bindings and uniforms, see `gpu.kernel.Kernel.source`."""
    form, b_type, a_type = c["form"], c["b_type"], c.get("a_type", "f32")
    stacked, gated, quads = c.get("stacked", False), c.get("gated", False), c["quads"]
    adapted, across, thin = "factor" in present, form == "tn", tile.family == "thin"
    slots = "ranges" in present and not adapted
    grouped = slots and not across
    by_columns, by_steps = stacked and form == "nt", stacked and form == "nn"
    format = "dense" if b_type in DENSE else "codes" if b_type == "codes" else "packed"
    orientation = ("nn" if across else "nt") if thin else "nt" if form == "nt" else "nn"
    m, n, k = "dims.n" if thin else "dims.m", "dims.n", "size" if by_steps else "dims.k"
    n = "dims.m" if thin else "n" if by_columns else n

    inner = "dims.m" if across else "dims.k"
    row_of_a = f"({inner} + dims.a_skip) + dims.a_first" if "a_skip" in dims else "dims.k"
    row_of_b = "(dims.n + dims.b_skip) + dims.b_first" if across else "dims.k" if form == "nt" else "dims.n"
    whole = tile.slices == 1 and (tile.span == 4 or (tile.span == 8 and c["octets"] and form == "nt"))
    if thin:
        extra = (", first: u32", ", b0") if grouped else ("", "")
        row = row_of_b + (" + first" if grouped else "")
        left = Left("b", b_type, "read_write" if across else "read", quads, k, row, whole, *extra)
    else:
        extra = (", size: u32, first: u32", ", size, part_a") if by_steps else ("", "")
        left = Left("a", a_type, "read_write", quads, k, "size + first" if by_steps else row_of_a, whole, *extra)

    # Neighbouring columns are loaded, or stored, together.
    own = format == "packed" and orientation == "nn"
    fours = tile.cols % 4 == 0 and across and quads and tile.wide
    held = own or (format == "dense" and orientation == "nn" and (a_type if thin else b_type) != "f32")
    even = quads and across if thin else c["even"]
    pairs = fours or (tile.cols % 2 == 0 and even and (tile.wide or held))
    width = 4 if fours else 2 if pairs else 1
    right = Right(
        "a" if thin else "b",
        a_type if thin else b_type,
        "read_write" if thin or across else "read",
        quads,
        "b0 + " if grouped and not thin else "part_b + " if stacked else "",
        row_of_a if thin else row_of_b if orientation == "nn" else k,
        k,
        "stop" if across else k,
        width,
    )
    # LoRA's second product: h[M, rank] with B[N, rank]^T or, backward, A[rank, N] of each slot.
    low, rank = c["low_quads"], "dims.rank"
    of_h = f"({rank} + dims.h_skip) + first"
    h = Left("h", "f32", "read_write", low, rank, of_h, tile.slices == 1, ", first: u32", ", h0", slots=True)
    if own:
        width = 4 if tile.cols % 4 == 0 and c["octets"] and low else 2 if c["even"] else 1
    of_factor = rank if orientation == "nt" else "dims.n"
    factor = Right("factor", "f32", "read", low, "f0 + ", of_factor, rank, rank, width)

    if across:
        y_row = "slot * dims.stride + row * " + n
    else:
        y_row = ("part_y + " if by_columns and not gated else "") + "row * "
        y_row += f"({n} + dims.y_skip) + dims.y_first" if "y_skip" in dims else n
    out, size_in = (n, "dims.k") if form == "nt" else (k, "dims.n")
    codes, scales = ("part_b", "part_scales") if stacked else ("0u", "0u")
    return Layout(
        across,
        grouped,
        adapted,
        thin,
        gated,
        stacked,
        by_columns,
        by_steps,
        format,
        orientation,
        form != "nt" if thin else across,
        m,
        n,
        k,
        y_row,
        "part_bias + " if by_columns else "",
        "part_b + " if stacked else "",
        "part_scales + " if stacked else "",
        f"Matrix({codes}, {scales}, {out}, {size_in})",
        tile.cols if own else 4 if fours else 2 if pairs else 1,
        pairs,
        left,
        right,
        h,
        factor,
        words_of(c["planes"], tile.cols if own else 8) if format == "packed" else (),
        vectors_of(tile.cols),
    )
