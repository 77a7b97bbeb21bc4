"""The C headers as data: constants, structs and functions, read from `include/` at import.

The headers are part of the package, so a declaration stands in one place. Only the style of these
headers is understood; a type that is not is a KeyError.
"""

import re
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, TypeVar

S = TypeVar("S", bound=Structure)

_SCALARS: dict[str, Any] = {
    **{"void": None, "float": c_float, "double": c_double, "size_t": c_size_t},
    **{"int32_t": c_int32, "uint32_t": c_uint32, "int64_t": c_int64, "uint64_t": c_uint64},
}
_structs: dict[str, type[Structure]] = {}  # by `mirror`


def _read() -> str:
    """All headers without comments, white space folded. In an editable package they are in the
    repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "include"
    folder = installed if installed.is_dir() else package.parents[1] / "include"
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.h")))
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


_TEXT = _read()
_HANDLES = set(re.findall(r"typedef struct \w+ \*(\w+);", _TEXT))
_ENUMS = set(re.findall(r"typedef enum [^{]*{[^}]*} (\w+);", _TEXT))
_BODIES = {name: body for body, name in re.findall(r"typedef struct \w* ?{(.*?)} (\w+);", _TEXT)}

# Enumerators and macros that are integers, without LLAISYS_.
CONSTANTS = {
    name: int(value)
    for pattern in (r"LLAISYS_(\w+) = (-?\d+)", r"#define LLAISYS_(\w+) (\d+)")
    for name, value in re.findall(pattern, _TEXT)
}


def members(prefix: str, *without: str) -> dict[str, int]:
    """The constants with a prefix, in lower case without it and without some."""
    names = {name: name.removeprefix(prefix).lower() for name in CONSTANTS}
    found = {names[name]: value for name, value in CONSTANTS.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if name not in without}


def mirror(struct: type[S]) -> type[S]:
    """Give a class the fields of the struct of its name. Pointers are `c_void_p`, so that addresses
    of numpy arrays can be assigned without a cast."""
    parts = [part.strip() for part in _BODIES[struct.__name__].split(";") if part.strip()]
    split = [re.fullmatch(r"(.*?)(\w+)", part) for part in parts]
    struct._fields_ = [(found[2], _kind(found[1])) for found in split if found is not None]
    _structs[struct.__name__] = struct
    return struct


def _kind(declared: str) -> Any:
    """The ctypes type of a C type."""
    base, *stars = declared.replace("const ", "").replace("*", " *").split()
    if stars:
        return c_char_p if base == "char" else c_void_p
    if base in _HANDLES:
        return c_void_p
    return c_int if base in _ENUMS else _structs.get(base) or _SCALARS[base]


def _argument(declared: str) -> Any:
    kind = re.sub(r"\w+$", "", declared.strip())
    base, *stars = kind.replace("const ", "").replace("*", " *").split()
    target = c_void_p if base in _HANDLES else _structs.get(base)
    return POINTER(target) if target is not None and stars else _kind(kind)


def functions() -> list[tuple[str, Any, list[Any]]]:
    """(name, result, arguments) of every function, once its structs are mirrored."""
    found = re.findall(r"LLAISYS_API ([\w *]+?)(llaisys\w+)\(([^)]*)\);", _TEXT)
    return [
        (name, _kind(result), [] if given == "void" else [*map(_argument, given.split(","))])
        for result, name, given in found
    ]
