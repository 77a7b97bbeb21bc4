"""Names of GGUF files: the quantization in a name, the parts of a split file, and the file that a
user asks for.

    Qwen3-8B-Q4_K_M.gguf                              one file of quantization Q4_K_M
    q4_k_m/qwen2.5-7b-q4_k_m-00002-of-00002.gguf      the second part of one of q4_k_m

Projectors of images (mmproj) and importance matrices (imatrix) are no models.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from llaisys.common.errors import ModelLoadError

DEFAULT_QUANT = "Q4_K_M"  # as in llama.cpp
MAX_LISTED = 40  # quantizations in an error

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)")
_QUANT = re.compile(
    r"(?:^|[-._])((?:ud-)?(?:i?q\d(?:_\d+)*(?:_[a-z]{1,3})*|tq\d_\d|mxfp4(?:_moe)?|nvfp4"
    r"|bf16|fp?16|fp?32))$"
)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF model of a repository or folder; a split one has several paths."""

    name: str  # of the first path, without folder, part number and suffix
    paths: tuple[str, ...]  # in order

    @property
    def quant(self) -> str:
        """The quantization as users write it; empty: the name has none."""
        match = _QUANT.search(self.name.lower())
        return match[1].upper() if match is not None else ""

    @property
    def label(self) -> str:
        return self.quant or self.name


def gguf_files(paths: Iterable[str]) -> list[GgufFile]:
    """The models among the paths of a repository. A split model with a part missing is left
    out."""
    parts: dict[str, dict[int, str]] = {}  # path without part number -> part number -> path
    counts: dict[str, int] = {}
    for path in sorted(paths):
        if not path.lower().endswith(".gguf"):
            continue
        stem = path[: -len(".gguf")]
        match = _PART.search(stem)
        whole = stem if match is None else stem[: match.start()]
        if _NO_MODEL.search(PurePosixPath(whole).name.lower()):
            continue
        counts[whole] = 1 if match is None else int(match[2])
        parts.setdefault(whole, {})[1 if match is None else int(match[1])] = path
    return [
        GgufFile(PurePosixPath(whole).name, tuple(found[number] for number in sorted(found)))
        for whole, found in parts.items()
        if sorted(found) == list(range(1, counts[whole] + 1))
    ]


def matching_files(files: Sequence[GgufFile], wanted: str) -> list[GgufFile]:
    """The files of a quantization (`q4_k_m`), a file name or a pattern with * and ?, without
    regard to case. Parts of a name match whole: `F16` is not `BF16`, nor is `Q4_K` `Q4_K_M`."""
    text = wanted.lower()
    text = _PART.sub("", text.removesuffix(".gguf"))
    if "*" in text or "?" in text:
        return [file for file in files if fnmatchcase(file.name.lower(), f"*{text}*")]
    for found in (
        [file for file in files if file.name.lower() == text],
        [file for file in files if file.quant.lower() == text],
    ):
        if found:
            return found
    part = re.compile(rf"(^|[-._]){re.escape(text)}([-.]|$)")
    return [file for file in files if part.search(file.name.lower())]


def choose_file(repo: str, files: Sequence[GgufFile], wanted: str | None) -> GgufFile:
    """The file of `wanted`; None: Q4_K_M, or the only one. Raises ModelLoadError, which lists what
    there is."""
    if not files:
        raise ModelLoadError(f"model: {repo!r} has no GGUF file")
    if wanted is None:
        found = list(files) if len(files) == 1 else matching_files(files, DEFAULT_QUANT)
    else:
        found = matching_files(files, wanted)
    if len(found) == 1:
        return found[0]
    if wanted is None:
        why = f"{repo!r} has GGUF files only, and {len(found)} of them are {DEFAULT_QUANT}"
    else:
        why = f"{len(found)} GGUF files of {repo!r} match {wanted!r}"
    names = zip(names_of(files), files, strict=True)
    labels = [name for name, file in names if file in (found or files)]
    shown = ", ".join(labels[:MAX_LISTED]) + (", ..." if len(labels) > MAX_LISTED else "")
    raise ModelLoadError(
        f"model: {why}; available: {shown} (write {repo}:{labels[0]})", available=tuple(labels)
    )


def names_of(files: Sequence[GgufFile]) -> list[str]:
    """What selects each file in a spec `org/name:...`: its quantization, or where that is not
    enough its name."""
    return [
        file.label if matching_files(files, file.label) == [file] else file.name for file in files
    ]


def is_later_part(name: str) -> bool:
    """Whether it is the name of the second or a later part of a split GGUF file."""
    match = _PART.search(name.removesuffix(".gguf"))
    return match is not None and int(match[1]) > 1
