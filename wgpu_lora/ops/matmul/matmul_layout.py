"""What the template of the matrix products derives from a call and a tiling: sizes, places and offsets, by name.

Sizes and offsets are WGSL expressions, since they are uniforms or, in a stack, variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wgpu_lora.gpu.tiling import MATRIX, Tiling

DENSE = ("f32", "bf16", "f16")
CODE_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}  # bits of a code in each plane (operands/codes.wgsl.j2)


@dataclass(frozen=True)
class Operand:
    """A dense operand. The rows of a left one are those of the tile, and the columns of a right one those of the lanes.

    quads: whether its rows are whole vec4s. row: offset of a row. size: values along the contraction.
    whole: whether rounds never pass the end of its rows, so that a left operand needs no check.
    parameters, arguments: of a left operand's load function, besides row and step.
    slots: whether only the rows of the current slot are loaded, and others are zeros.
    base: where a right operand's values begin. last: past its last step.
    width: how many neighbouring columns a load gives, if its rows are across the contraction.
    """

    name: str
    type: str
    access: str
    quads: bool
    row: str
    size: str
    whole: bool = False
    parameters: str = ""
    arguments: str = ""
    slots: bool = False
    base: str = ""
    last: str = ""
    width: int = 1

    @property
    def half(self) -> bool:
        return self.type != "f32"

    def load(self, row: str, step: str) -> str:
        """Four values of a row."""
        load = f"load_{self.name}({row}, {step}{self.arguments})"
        return f"select(vec4<f32>(), {load}, {row} >= slot_first && {row} < slot_last)" if self.slots else load


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
    """A word of the codes of eight neighbours, of a plane of `bits` bits a code.

    start: where the plane begins, before '+', in words of a row. number: among those words of the plane.
    used: whether a lane has columns in it. inside: whether its codes may begin inside of the word.
    """

    plane: int
    bits: int
    start: str
    number: int
    used: bool
    inside: bool

    @property
    def name(self) -> str:
        return f"word{self.plane}_{self.number}"

    def row(self, column: str) -> str:
        """Its number in W's row that has the codes from `column` on."""
        return f"{self.start}{column} / {32 // self.bits}u" + (f" + {self.number}u" if self.number else "")

    def inside_row(self, column: str) -> str:
        """Its number in the plane, or that of the last word, if W's row ends before."""
        own, codes = f"{column} / {32 // self.bits}u", 32 // self.bits
        return f"min({own} + {self.number}u, (w.size_in - 1u) / {codes}u)" if self.number else own

    def shift(self, column: str) -> str:
        """Shifts the code of `column` to the lowest bits."""
        return f" >> (({column} & {32 // self.bits - 1}u) * {self.bits}u)" if self.inside else ""


def words_of(planes: Sequence[int], count: int) -> tuple[Word, ...]:
    """The words of eight neighbours, of all planes, of which a lane has `count`."""
    starts = ["".join(f"(w.size_in * {b}u + 31u) / 32u + " for b in planes[:plane]) for plane in range(len(planes))]
    return tuple(
        Word(plane, bits, starts[plane], number, 32 * number < bits * count, bits * count < 32)
        for plane, bits in enumerate(planes)
        for number in range(max(1, bits // 4))
    )


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
    y_row: offset of a row of y. bias, codes, scales: where a part's begin, before '+'.
    matrix: a packed W (operands/packed.wgsl.j2). run: its neighbours in a row that a thread decodes together, if tiled.
    tiled: whether a workgroup's threads load for each other.
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
    run: int
    tiled: bool
    neighbours: int
    pairs: bool
    left: Operand
    right: Operand
    h: Operand
    factor: Operand
    words: tuple[Word, ...]
    vectors: tuple[Vector, ...]

    def element(self, column: int) -> str:
        """What follows a register's name for a single column."""
        vector = self.vectors[column // 4]
        return vector.suffix if vector.size == 1 else f"{vector.suffix}.{'xyzw'[column % 4]}"

    def bits(self, *offset: int) -> str:
        """What `decode8` takes: the words at an offset, one value or a vector."""
        names = ["_".join([word.name, *map(str, offset)]) if word.used else "0u" for word in self.words]
        return names[0] if len(names) == 1 else f"vec{len(names)}<u32>({', '.join(names)})"

    @property
    def packed_columns(self) -> bool:
        """Whether a lane's columns are all side by side, as packed words have them."""
        return self.format == "packed" and self.orientation == "nn"


def product_layout(c: Mapping[str, Any], present: Sequence[str], dims: Sequence[str], tile: Tiling) -> Layout:
    """The layout of a call with these constants, bindings and uniforms, see `gpu.kernel.Kernel.source`."""
    form, b_type, a_type = c["form"], c["b_type"], c.get("a_type", "f32")
    stacked, gated, quads, low = c.get("stacked", False), c.get("gated", False), c["quads"], c["low_quads"]
    adapted, across, thin = "factor" in present, form == "tn", tile.family == "thin"
    grouped = "ranges" in present and not adapted and not across
    by_columns, by_steps = stacked and form == "nt", stacked and form == "nn"
    format = "dense" if b_type in DENSE else "codes" if b_type == "codes" else "packed"
    orientation = ("nn" if across else "nt") if thin else "nt" if form == "nt" else "nn"
    n, k = "dims.m" if thin else "n" if by_columns else "dims.n", "size" if by_steps else "dims.k"

    # Neighbouring columns are loaded, or stored, together.
    packed_columns = format == "packed" and orientation == "nn"
    tiled = tile.shares_memory
    planes = CODE_PLANES[c["bits"]] if format == "codes" else c.get("planes", ())
    # Along W's rows, a thread decodes two of them. With many threads, not all would have eight columns.
    few = orientation == "nn" and tile.cols * tile.width * tile.span < 16 * tile.lanes
    run = 4 if tile.family == MATRIX and few and planes and c.get("file") != "nf4_ragged" else 8
    fours = tile.cols % 4 == 0 and across and quads and tile.wide
    by_word = packed_columns or (format == "dense" and orientation == "nn" and (a_type if thin else b_type) != "f32")
    even = quads and across if thin else c["even"]
    pairs = fours or (tile.cols % 2 == 0 and even and (tile.wide or by_word))
    width = 4 if fours else 2 if pairs else 1

    row_of_a = f"({'dims.m' if across else 'dims.k'} + dims.a_skip) + dims.a_first" if "a_skip" in dims else "dims.k"
    row_of_b = "(dims.n + dims.b_skip) + dims.b_first" if across else "dims.k" if form == "nt" else "dims.n"
    whole = tile.slices == 1 and (tile.span == 4 or (tile.span == 8 and c["octets"] and form == "nt"))
    extra = (", first: u32", ", b0") if thin and grouped else (", size: u32, first: u32", ", size, part_a")
    a = Operand("a", a_type, "read_write", quads, "size + first" if by_steps else row_of_a, k, whole)
    b = Operand("b", b_type, "read_write" if across else "read", quads, row_of_b, k, whole)
    left, right = (b, a) if thin else (a, b)
    if (thin and grouped) or by_steps:
        row = row_of_b + " + first" if thin else left.row
        left = replace(left, row=row, parameters=extra[0], arguments=extra[1])
    base = "b0 + " if grouped and not thin else "part_b + " if stacked else ""
    row = right.row if thin or orientation == "nn" else k
    right = replace(right, row=row, base=base, last="stop" if across else k, width=width)
    # LoRA's second product: h[M, rank] with B[N, rank]^T or, backward, A[rank, N] of each slot.
    h = Operand(
        "h", "f32", "read_write", low, "(dims.rank + dims.h_skip) + first", "dims.rank",
        whole=tile.slices == 1, parameters=", first: u32", arguments=", h0", slots=True,
    )  # fmt: skip
    row, factor_width = "dims.rank" if orientation == "nt" else "dims.n", width
    if packed_columns or tiled:
        factor_width = 4 if tile.cols % 4 == 0 and c["octets"] and low else 2 if c["even"] else 1
    factor = Operand("factor", "f32", "read", low, row, "dims.rank", base="f0 + ", last="dims.rank", width=factor_width)

    row_of_y = f"({n} + dims.y_skip) + dims.y_first" if "y_skip" in dims and not across else n
    part_of_y = "slot * dims.stride + " if across else "part_y + " if by_columns and not gated else ""
    shape = f"{n}, dims.k" if form == "nt" else f"{k}, dims.n"
    offset = f"part_b, {'0u' if format == 'dense' else 'part_scales'}" if stacked else "0u, 0u"
    if "w_skip" in dims and not stacked:
        offset, shape = "dims.w_first, dims.w_first", shape.replace(",", " + dims.w_skip,")
    return Layout(
        across=across,
        grouped=grouped,
        adapted=adapted,
        thin=thin,
        gated=gated,
        stacked=stacked,
        by_columns=by_columns,
        by_steps=by_steps,
        format=format,
        orientation=orientation,
        left_columns=form != "nt" if thin else across,
        m="dims.n" if thin else "dims.m",
        n=n,
        k=k,
        y_row=f"{part_of_y}row * {row_of_y}",
        bias="part_bias + " if by_columns else "",
        codes="part_b + " if stacked else "",
        scales="part_scales + " if stacked else "",
        matrix=f"Matrix({offset}, {shape})",
        run=run,
        tiled=tiled,
        neighbours=tile.cols if packed_columns or tiled else width,
        pairs=pairs,
        left=left,
        right=right,
        h=h,
        factor=factor,
        words=words_of(planes, tile.cols if packed_columns and not tiled else run),
        vectors=vectors_of(tile.cols),
    )
