"""The ctypes mirror matches the C headers: sizes, offsets, kinds, signatures, values.

A C11 program generated from the mirror is compiled at test time and prints what the compiler
thinks; the headers are read here by other expressions than in the mirror.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from native_helpers import ROOT, KvStatus, is_sanitized

from llaisys.common import sampling
from llaisys.libllaisys import types
from llaisys.libllaisys.headers import functions
from llaisys.libllaisys.library import lib, library_path
from llaisys.libllaisys.types import LlaisysStageProfile

INCLUDE = ROOT / "include"
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
WARNINGS = ("-Wall", "-Wextra", "-pedantic", "-Werror")


def compiler(variable: str, *names: str) -> list[str]:
    """Return a compiler command; $CC and $CXX come first."""
    given = os.environ.get(variable)
    if given:
        return given.split()
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"no compiler: looked for {', '.join(names)}")
    return [found]


def clean_environment() -> dict[str, str]:
    """Return the environment without a preloaded sanitizer."""
    return {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_c(source: str, folder: Path, *flags: str) -> str:
    """Compile a C11 program and return what it prints."""
    (folder / "program.c").write_text(source)
    run(
        *compiler("CC", "gcc", "clang", "cc"), "-std=c11", *WARNINGS, f"-I{INCLUDE}",
        str(folder / "program.c"), "-o", str(folder / "program"), *flags,
    )  # fmt: skip
    return run(str(folder / "program"))


# -- The headers as text --------------------------------------------------------------------------


def header_text() -> str:
    """All headers without comments and preprocessor lines."""
    text = "\n".join((INCLUDE / name).read_text() for name in HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"^#.*$", "", text, flags=re.M)


TEXT = header_text()
STRUCTS = {
    name: [re.search(r"(\w+)$", line).group(1) for line in body.split(";") if line.strip()]
    for body, name in re.findall(r"typedef struct(?: \w+)? \{(.*?)\} (\w+);", TEXT, re.S)
    for body in [re.sub(r"\s+", " ", body).replace(" ;", ";")]
}
ENUMS = {
    name: re.findall(r"\b(LLAISYS_\w+)", body)
    for body, name in re.findall(r"typedef enum(?: \w+)* \{(.*?)\} (\w+);", TEXT, re.S)
}
PROTOTYPES = {
    name: (result.strip(), [part.strip() for part in arguments.split(",")])
    for result, name, arguments in re.findall(
        r"LLAISYS_API\s+([\w\s*]+?)\b(llaisys\w+)\(([^)]*)\);", re.sub(r"\s+", " ", TEXT)
    )
}
HANDLES = set(re.findall(r"typedef struct \w+ \*(\w+);", TEXT))


def mirrored_structs() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(types).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and name in STRUCTS
    }


def mirrored_functions() -> dict[str, tuple[Any, list[Any]]]:
    return {name: (result, arguments) for name, result, arguments in functions()}


def test_headers_are_parsed() -> None:
    assert len(STRUCTS) >= 9 and len(ENUMS) >= 9 and len(PROTOTYPES) > 60
    assert TEXT.count("LLAISYS_API llaisys") + len(re.findall(r"LLAISYS_API \w", TEXT)) >= len(
        PROTOTYPES
    )
    assert len(re.findall(r"\bLLAISYS_API\b", TEXT)) == len(PROTOTYPES)


def test_both_sides_have_the_same_structs() -> None:
    assert set(mirrored_structs()) == set(STRUCTS)


def test_both_sides_have_the_same_functions() -> None:
    assert set(mirrored_functions()) == set(PROTOTYPES)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_fields_have_the_same_names_in_the_same_order(name: str) -> None:
    assert [field[0] for field in mirrored_structs()[name]._fields_] == STRUCTS[name]


# -- Structs against the compiler -----------------------------------------------------------------

KIND = """
#define KIND(x) _Generic((x), int8_t: "i8", uint8_t: "u8", int32_t: "i32", uint32_t: "u32", \\
    int64_t: "i64", uint64_t: "u64", float: "f32", double: "f64", \\
    LlaisysStageProfile: "stage", LlaisysDecoderMeta: "decoder", default: "pointer")
"""
KINDS = {
    ctypes.c_int32: {"i32"}, ctypes.c_uint32: {"u32"}, ctypes.c_int64: {"i64"},
    ctypes.c_uint64: {"u64"}, ctypes.c_size_t: {"u64", "u32"}, ctypes.c_float: {"f32"},
    ctypes.c_void_p: {"pointer"}, ctypes.c_char_p: {"pointer"}, ctypes.c_double: {"f64"},
    LlaisysStageProfile: {"stage"}, types.LlaisysDecoderMeta: {"decoder"},
}  # fmt: skip


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{struct: {size, fields: {name: [offset, size, kind]}}} as the compiler sees it."""
    lines = []
    for name, struct in mirrored_structs().items():
        lines.append(
            f'printf("\\"{name}\\": {{\\"size\\": %zu, \\"fields\\": {{", sizeof({name}));'
        )
        for i, field in enumerate(struct._fields_):
            item = f"(({name} *)0)->{field[0]}"
            lines.append(
                f'printf("{", " if i else ""}\\"{field[0]}\\": [%zu, %zu, \\"%s\\"]", '
                f"offsetof({name}, {field[0]}), sizeof({item}), KIND(probe_{name}.{field[0]}));"
            )
        lines.append('printf("}},\\n");')
    probes = "\n".join(f"static {name} probe_{name};" for name in mirrored_structs())
    source = (
        '#include "llaisys.h"\n#include <stdio.h>\n'
        f'{KIND}{probes}\nint main(void) {{ printf("{{"); {" ".join(lines)} '
        'printf("\\"end\\": {}}"); return 0; }\n'
    )
    parsed: dict[str, Any] = json.loads(run_c(source, tmp_path_factory.mktemp("abi")))
    return parsed


@pytest.mark.parametrize("name", sorted(mirrored_structs()))
def test_size_and_every_offset(name: str, layouts: dict[str, Any]) -> None:
    struct = mirrored_structs()[name]
    assert ctypes.sizeof(struct) == layouts[name]["size"]
    for field, kind in struct._fields_:
        mirrored = getattr(struct, field)
        offset, size, c_kind = layouts[name]["fields"][field]
        assert (mirrored.offset, mirrored.size) == (offset, size), f"{name}.{field}"
        # An enumeration without negative values may be unsigned; the mirror has a C int for it.
        allowed = KINDS[kind] | ({"u32"} if is_enum_field(name, field) else set())
        assert c_kind in allowed, f"{name}.{field} is {c_kind} in C, {kind.__name__} in the mirror"


def is_enum_field(struct: str, field: str) -> bool:
    body = re.search(r"typedef struct(?: \w+)? \{([^}]*)\} " + struct + ";", TEXT).group(1)
    declared = re.search(r"(\w+)\s+" + field + ";", body)
    return declared is not None and declared.group(1) in ENUMS


# -- Signatures -----------------------------------------------------------------------------------

SCALARS = {
    "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float,
    "double": ctypes.c_double,
}  # fmt: skip


def matches(declared: str, mirrored: Any) -> bool:
    """Return whether a C type and a ctypes type are passed alike."""
    words = declared.replace("const ", "").split("*")
    base = words[0].split()[0] if words[0].split() else ""
    is_pointer = len(words) > 1 or base in HANDLES
    if declared == "void":
        return mirrored is None
    if is_pointer:
        if mirrored in (ctypes.c_void_p, ctypes.c_char_p):
            return True
        target = getattr(mirrored, "_type_", None)
        if target is None or isinstance(target, str):
            return False
        if target is ctypes.c_void_p:  # pointer to a handle
            return base in HANDLES
        return target is SCALARS.get(base) or getattr(target, "__name__", "") == base
    if base in ENUMS:
        return mirrored is ctypes.c_int
    if base in STRUCTS:
        return getattr(mirrored, "__name__", "") == base
    return SCALARS.get(base) is mirrored


@pytest.mark.parametrize("name", sorted(PROTOTYPES))
def test_signature(name: str) -> None:
    result, arguments = PROTOTYPES[name]
    mirrored_result, mirrored = mirrored_functions()[name]
    declared = [] if arguments == ["void"] else [re.sub(r"\w+$", "", a).strip() for a in arguments]
    assert matches(result, mirrored_result), f"{result} is mirrored as {mirrored_result}"
    assert len(declared) == len(mirrored)
    for text, kind in zip(declared, mirrored, strict=True):
        assert matches(text, kind), f"{text} is mirrored as {kind}"


def test_library_exports_exactly_the_declared_functions() -> None:
    for name in PROTOTYPES:
        assert hasattr(lib(), name), name
    nm = shutil.which("nm")
    if nm is None or is_sanitized():  # sanitized builds export more
        return
    lines = run(nm, "-D", "--defined-only", str(library_path())).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    assert {name for name in exported if name.startswith("llaisys")} == set(PROTOTYPES)


# -- Values ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    names = [name for members in ENUMS.values() for name in members]
    names += ["LLAISYS_ABI_VERSION", "LLAISYS_MAX_DIMS"]
    prints = " ".join(f'printf("{name} %d\\n", (int){name});' for name in names)
    source = f'#include "llaisys.h"\n#include <stdio.h>\nint main(void) {{ {prints} return 0; }}\n'
    lines = run_c(source, tmp_path_factory.mktemp("values")).split("\n")
    return {name: int(value) for name, value in (line.split() for line in lines if line)}


def values_of(enum: str, prefix: str, values: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix(prefix): values[name] for name in ENUMS[enum]}


def test_enumerations_have_the_same_values(values: dict[str, int]) -> None:
    def upper(names: dict[str, int]) -> dict[str, int]:
        return {name.upper(): value for name, value in names.items()}

    dtypes = values_of("llaisysDataType_t", "LLAISYS_DTYPE_", values)
    assert dtypes.pop("INVALID") == 0 and dtypes.pop("COUNT") == len(dtypes) + 1
    assert dtypes == upper(types.DTYPES)
    devices = values_of("llaisysDeviceType_t", "LLAISYS_DEVICE_", values)
    assert devices.pop("TYPE_COUNT") == len(devices)
    assert devices == upper(types.DEVICES)
    assert values_of("LlaisysModelType", "LLAISYS_MODEL_TYPE_", values) == upper(types.MODEL_TYPES)
    assert values_of("LlaisysKvLayout", "LLAISYS_KV_LAYOUT_", values) == upper(types.LAYOUTS)
    assert values_of("LlaisysKvStatus", "LLAISYS_KV_", values) == {
        status.name: status.value for status in KvStatus
    }
    kinds = values_of("LlaisysSamplerKind", "LLAISYS_SAMPLER_", values)
    assert kinds.pop("COUNT") == len(kinds)
    assert kinds == {kind.name: kind.value for kind in sampling.SamplerKind}
    for name, value in values_of("llaisysStatus_t", "LLAISYS_", values).items():
        assert getattr(types, name) == value
    assert values["LLAISYS_DECODE_NO_KV_SLOT"] == types.DECODE_NO_KV_SLOT
    assert values["LLAISYS_DECODE_OK"] == 0 and values["LLAISYS_DECODE_ABORTED"] == 2


def test_versions_and_limits(values: dict[str, int]) -> None:
    assert values["LLAISYS_ABI_VERSION"] == types.ABI_VERSION == lib().llaisysAbiVersion()
    assert values["LLAISYS_MAX_DIMS"] == types.MAX_DIMS


def test_dtype_names_and_traits() -> None:
    for name, code in types.DTYPES.items():
        assert lib().llaisysDataTypeName(code) == name.encode()
        traits = types.LlaisysDataTypeTraits()
        assert lib().llaisysDataTypeGetTraits(code, ctypes.byref(traits)) == 0
        expected = (1, types.DTYPE_BYTES.get(name))
        if name in types.QUANTISED_DTYPES:
            # Ours: s as f32, z as f16 (not with f8 and i8_channel), then the values.
            bits, _, span = name[1:].replace("_channel", "_g32").partition("_g")
            header = 4 if name in ("f8_g128", "i8_channel") else 6
            expected = (
                (int(span), header + int(span) * int(bits) // 8)
                if span
                else GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
            )
        assert (traits.block_elements, traits.block_bytes) == expected
    for code in (0, 26, 99):
        assert lib().llaisysDataTypeName(code) == b"invalid"
        assert lib().llaisysDataTypeGetTraits(code, ctypes.byref(traits)) == types.ERROR_INVALID
    assert lib().llaisysDataTypeGetTraits(1, None) == types.ERROR_INVALID
    assert b"traits" in lib().llaisysLastError()


# -- The headers as sources -----------------------------------------------------------------------


@pytest.mark.parametrize("header", HEADERS)
def test_each_header_compiles_alone_as_c11_and_cxx17(header: str, tmp_path: Path) -> None:
    text = f'#include "{header}"\n#include "{header}"\nint llaisys_header_was_read(void);\n'
    (tmp_path / "alone.c").write_text(text)
    (tmp_path / "alone.cpp").write_text(text)
    c = compiler("CC", "gcc", "clang", "cc")
    cxx = compiler("CXX", "g++", "clang++", "c++")
    flags = (*WARNINGS, f"-I{INCLUDE}", "-fsyntax-only")
    run(*c, "-std=c11", *flags, str(tmp_path / "alone.c"))
    run(*cxx, "-std=c++17", *flags, str(tmp_path / "alone.cpp"))


def test_example_of_the_c_api_page_compiles_and_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "internals" / "c_api.md").read_text()
    examples = re.findall(r"```c\n(.*?)```", page, re.S)
    complete = [text for text in examples if "int main" in text]
    assert len(complete) == 1
    if is_sanitized():
        pytest.skip("a sanitized library needs its runtime preloaded")
    library = library_path().resolve()
    flags = (str(library), f"-Wl,-rpath,{library.parent}")
    printed = run_c(complete[0], tmp_path, *flags)
    assert "error" not in printed.lower() and printed.strip()
