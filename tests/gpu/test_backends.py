"""cffi finds the same types with fewer declarations."""

from __future__ import annotations

import cffi
import pytest

from wgpu_lora.gpu.backends.wgpu_native import declare_only_used_types

HEADER = """
typedef unsigned int Flags;
typedef enum Kind { Kind_A = 0, Kind_B = 1 } Kind;
typedef struct Chained { struct Chained *next; Kind kind; } Chained;
typedef void (*Callback)(Kind kind, Chained const *chained, Flags flags);
"""
DECLARATIONS = ["Flags", "Chained *", "Chained * ", "Chained[3]", "Kind", "Callback", "char []", "struct Chained *",
                "void (*)(Kind, Chained *, void *)", "struct New *"]  # fmt: skip


def test_types_are_the_same() -> None:
    plain, quick = cffi.FFI(), cffi.FFI()
    for ffi in (plain, quick):
        ffi.cdef(HEADER)
    declare_only_used_types(quick)
    shapes = [[str(ffi.typeof(text)) for text in DECLARATIONS] for ffi in (plain, quick)]
    assert shapes[0] == shapes[1]
    assert quick.typeof("struct New *") is quick.typeof("struct New  *")
    with pytest.raises(cffi.CDefError):
        quick.typeof("Unknown")


def test_another_cffi_is_left_as_it_is() -> None:
    declare_only_used_types(object())
