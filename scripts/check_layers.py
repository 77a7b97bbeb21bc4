#!/usr/bin/env python3
"""Check the layer rules of the project: allowed imports and includes.

    scripts/check_layers.py [ROOT]     prints `file:line: rule` per violation; exit status 1 if any

`layer_tables.py` has the rules. Python files are checked by their syntax tree (including imports
under TYPE_CHECKING and inside functions), C++ files by their #include lines. Test modules import
no other test module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parent))

from layer_tables import (
    CPP_FORBIDDEN_HEADERS,
    CPP_LAYERS,
    CPP_NEVER,
    MAX_SERVER_LEVELS,
    PY_EXTERNAL_NEVER,
    PY_EXTERNAL_ONLY,
    PY_LAYERS,
    PY_UNSAFE_ATTRIBUTES,
    PY_UNSAFE_CALLS,
    PY_UNSAFE_MODULES,
    PY_UNSAFE_NAMES,
    SERVER_LEVELS,
)


@dataclass(frozen=True)
class Violation:
    path: Path
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


@cache
def covers(entry: str, target: str) -> bool:
    """Whether a table entry matches `target`: the same path, or a parent folder."""
    parts, wanted = entry.split("/"), target.split("/")
    if len(parts) > len(wanted):
        return False
    return all(fnmatchcase(b, a) for a, b in zip(parts, wanted, strict=False))


def layer_of(path: str, layers: dict[str, list[str]]) -> str | None:
    """The row of `path`: the longest entry that covers it. `ops/*` becomes `ops/<operator>`."""
    folder_rows_only = "/".join(PurePosixPath(path).parts[:-1])
    rows = [row for row in layers if covers(row, folder_rows_only if "*" in row else path)]
    if not rows:
        return None
    row = max(rows, key=lambda row: len(PurePosixPath(row).parts))
    if "*" not in row:
        return row
    return "/".join(PurePosixPath(path).parts[: len(PurePosixPath(row).parts)])


def allowed(layer: str, target: str, layers: dict[str, list[str]]) -> bool:
    entries = layers.get(layer) or next(
        (layers[row] for row in layers if "*" in row and covers(row, layer)), []
    )
    if any(covers(entry[1:], target) for entry in entries if entry.startswith("-")):
        return False
    if layer_of(target, layers) == layer:
        return True
    for entry in entries:
        # A header pattern (`ops/*.hpp`) names files of exactly that depth.
        if "." in entry and len(PurePosixPath(entry).parts) != len(PurePosixPath(target).parts):
            continue
        if covers(entry, target):
            return True
    return False


# ---- Python --------------------------------------------------------------------------------------


def resolve_relative(module: str | None, level: int, package: list[str]) -> str:
    """The absolute name of `from <level dots><module> import ...` inside `package`."""
    if level == 0:
        return module or ""
    base = package[: len(package) - level + 1]
    return ".".join([*base, *([module] if module else [])])


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """(line, candidate names); the longest existing candidate is the imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, [alias.name]
        elif isinstance(node, ast.ImportFrom):
            module = resolve_relative(node.module, node.level, package)
            for alias in node.names:
                yield node.lineno, [f"{module}.{alias.name}", module]
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            name = function.id if isinstance(function, ast.Name) else name
            argument = node.args[0]
            if (
                name in ("import_module", "__import__")
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
            ):
                level = len(argument.value) - len(argument.value.lstrip("."))
                wanted = argument.value.lstrip(".") or None
                yield node.lineno, [resolve_relative(wanted, level, package)]


def internal_path(candidates: list[str], package_root: Path) -> str:
    """The path below python/llaisys of the first candidate that exists there."""
    for name in candidates:
        path = "/".join(name.split(".")[1:])
        if path and ((package_root / path).is_dir() or (package_root / f"{path}.py").is_file()):
            return path
    return "/".join(candidates[-1].split(".")[1:]) or "__init__"


def check_python_imports(
    tree: ast.AST,
    module: str,
    layer: str,
    package_root: Path,
    imports: dict[str, dict[str, int]],
) -> Iterator[tuple[int, str]]:
    """Violations of one module; adds its imports within the package to `imports`."""
    own = imports.setdefault(module, {})
    package = ["llaisys", *module.split("/")[:-1]]
    for line, candidates in imported_modules(tree, package):
        top = candidates[-1].split(".")[0]
        if top == "llaisys":
            target = internal_path(candidates, package_root)
            is_package = (package_root / target).is_dir()
            own.setdefault(f"{target}/__init__" if is_package else target, line)
            if target == "__init__":
                if layer != "__main__":
                    yield line, f"{layer} must not import the package itself (a cycle)"
            elif layer_of(target, PY_LAYERS) is None:
                yield line, f"{layer} imports llaisys/{target}, which is in no layer"
            elif not allowed(layer, target, PY_LAYERS):
                yield line, f"{layer} must not import {target}"
            continue
        if top in PY_EXTERNAL_ONLY and layer not in PY_EXTERNAL_ONLY[top]:
            only = ", ".join(PY_EXTERNAL_ONLY[top]) or "no layer"
            yield line, f"{layer} must not import {top} (allowed in: {only})"
        if top in PY_EXTERNAL_NEVER.get(layer, []):
            yield line, f"{layer} must not import {top}"
        if top in PY_UNSAFE_MODULES:
            yield line, f"{top} is not allowed: it runs what it reads"


def check_python_safety(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in PY_UNSAFE_CALLS:
                yield node.lineno, f"{function.id}() is not allowed"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in PY_UNSAFE_ATTRIBUTES:
                yield node.lineno, f"{node.value.id}.{node.attr} is not allowed"
            elif node.value.id == "builtins" and node.attr in PY_UNSAFE_CALLS:
                yield node.lineno, f"{node.attr}() is not allowed"
        name, value = None, None
        if isinstance(node, ast.keyword):
            name, value = node.arg, node.value
        elif isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        if name in PY_UNSAFE_NAMES and not (
            isinstance(value, ast.Constant) and value.value is False
        ):
            yield getattr(node, "lineno", 0), f"{name} is not allowed"


def check_cycles(imports: dict[str, dict[str, int]]) -> Iterator[Violation]:
    """Import cycles. `imports`: module -> imported module -> line."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle = error.args[1][::-1]  # each imports the next
        rule = f"import cycle: {' -> '.join(cycle)}"
        path = Path("python/llaisys") / f"{cycle[0]}.py"
        yield Violation(path, imports[cycle[0]][cycle[1]], rule)


def check_python(root: Path) -> Iterator[Violation]:
    package_root = root / "python" / "llaisys"
    imports: dict[str, dict[str, int]] = {}
    for path in sorted(package_root.rglob("*.py")):
        shown = path.relative_to(root)
        module = path.relative_to(package_root).with_suffix("").as_posix()
        layer = layer_of(module, PY_LAYERS)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        except SyntaxError as error:
            yield Violation(shown, error.lineno or 1, f"cannot be parsed: {error.msg}")
            continue
        if layer is None:
            yield Violation(shown, 1, "is in no layer: add it to scripts/layer_tables.py")
        else:
            for line, rule in check_python_imports(tree, module, layer, package_root, imports):
                yield Violation(shown, line, rule)
        for line, rule in check_python_safety(tree):
            yield Violation(shown, line, rule)
    yield from check_cycles(imports)
    if len(SERVER_LEVELS) > MAX_SERVER_LEVELS:
        rule = f"the server has {len(SERVER_LEVELS)} levels; at most {MAX_SERVER_LEVELS}"
        yield Violation(Path("scripts/layer_tables.py"), 1, rule)


# ---- C++ -----------------------------------------------------------------------------------------

CPP_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
PRAGMA_OMP = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+omp\b", re.MULTILINE)


def without_comments(text: str) -> str:
    """The text with blanked comments and unchanged line numbers, for preprocessor lines."""
    return COMMENT.sub(lambda found: "\n" * found.group().count("\n") or " ", text)


def resolve_include(name: str, quoted: bool, including: Path, root: Path) -> Path | None:
    """The project file of an #include, or None for an external header."""
    folders = [including.parent] if quoted else []
    for folder in [*folders, root / "src", root / "include"]:
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate
    # A missing header is checked by its name.
    first = PurePosixPath(name).parts[0]
    if any(row.split("/")[0] == first for row in CPP_LAYERS):
        return root / "src" / name
    return None


def check_cpp_file(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    source_root, public_root = root / "src", root / "include"
    is_public = path.is_relative_to(public_root)
    inside = path.relative_to(public_root if is_public else source_root).as_posix()
    layer = "a public header" if is_public else layer_of(inside, CPP_LAYERS)
    if layer is None:
        yield 1, "is in no layer: add it to scripts/layer_tables.py"
        return
    never = [
        entry
        for file, entries in CPP_NEVER.items()
        if PurePosixPath(inside).match(file)
        for entry in entries
    ]
    text = without_comments(path.read_text(encoding="utf-8"))
    for found in PRAGMA_OMP.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, CPP_FORBIDDEN_HEADERS["omp.h"]
    for found in INCLUDE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        name = found.group(1) or found.group(2)
        if name in CPP_FORBIDDEN_HEADERS:
            yield line, CPP_FORBIDDEN_HEADERS[name]
        header = resolve_include(name, found.group(1) is not None, path, root)
        if header is None or header.is_relative_to(public_root):
            continue
        if not header.is_relative_to(source_root):
            yield line, f'{layer} must not include "{name}" (outside src/ and include/)'
            continue
        target = header.relative_to(source_root).as_posix()
        if is_public:
            yield line, f"a public header must not include {target} (it is inside src/)"
        elif layer_of(target, CPP_LAYERS) is None:
            yield line, f"{layer} includes {target}, which is in no layer"
        elif not allowed(layer, target, CPP_LAYERS):
            yield line, f"{layer} must not include {target}"
        elif any(covers(entry, target) for entry in never):
            yield line, f"{inside} must not include {target}"


def check_cpp(root: Path) -> Iterator[Violation]:
    for folder in ("include", "src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CPP_SUFFIXES and path.is_file():
                for line, rule in check_cpp_file(path, root):
                    yield Violation(path.relative_to(root), line, rule)


# ---- Tests ---------------------------------------------------------------------------------------


# What an import of a test module contains; most files need not be parsed.
NAMED_TEST = re.compile(
    r"""(?:import|from)(?:\s|[^\n]*[\s,("'])test_|(?:import_module|__)\(\s*["']test_"""
)


def check_tests(root: Path) -> Iterator[Violation]:
    """No file of the tests imports a test module: what several need is in test/helpers."""
    for path in sorted((root / "test").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not NAMED_TEST.search(text):
            continue
        for line, candidates in imported_modules(ast.parse(text), []):
            if candidates[-1].startswith("test_"):
                rule = f"must not import the tests of {candidates[-1]}: share code in test/helpers"
                yield Violation(path.relative_to(root), line, rule)


def check(root: Path) -> list[Violation]:
    """Every violation in the tree at `root`, in file order."""
    root = root.resolve()
    return [*check_cpp(root), *check_python(root), *check_tests(root)]


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"layers: {len(violations)} violation(s)" if violations else "layers: ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
