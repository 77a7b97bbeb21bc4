"""Models of the Hugging Face hub: a repository with safetensors, or one GGUF model of it."""

import glob
import logging
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.common.progress import report
from llaisys.models.loading.gguf_names import GgufFile, choose_file, gguf_files, names_of
from llaisys.models.loading.local_models import cache_directory
from llaisys.models.loading.safetensors_dir import INDEX_NAME

logger = logging.getLogger("llaisys.models")

HINT = "behind a proxy set HTTPS_PROXY, for a gated model HF_TOKEN; offline use a path"
FILES = (
    *("*.safetensors", "config.json", "generation_config.json", INDEX_NAME),
    "adapter_config.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "vocab.txt"),
    *("sentencepiece.bpe.model", "*.tiktoken", "tiktoken.model"),
    *("modules.json", "1_Pooling/config.json"),
)
# Of the folders only 1_Pooling.
IGNORED = ("*.py", "*.bin", "*.pt", "*.pth", "[!1]*/*")


def fetch_from_hub(
    repo: str, quant: str | None, revision: str | None, cache_dir: str | Path | None, bar: bool
) -> Path:
    """The directory of a repository's safetensors and tokenizer files, or one GGUF file.

    `quant`: which GGUF file; None: safetensors, and where the repository has none its GGUF file of
    the default quantization. The hub is asked first, then the cache. Raises ModelLoadError.
    """
    try:
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise ModelLoadError(f"model: {repo!r} needs the huggingface_hub package") from error
    if not bar:
        disable_progress_bars()
    hub = _Repository(repo, revision, cache_dir)
    report("fetching the model")
    if quant is None:
        folder = hub.snapshot(FILES, IGNORED)
        if any(folder.glob("*.safetensors")):
            return folder
    files = gguf_files(hub.names())
    if quant is None and not files:
        raise ModelLoadError(f"model: {repo!r} has neither safetensors nor GGUF files")
    chosen = choose_file(repo, files, quant)
    if quant is None:
        _report_choice(repo, chosen, files)
    folder = hub.snapshot([glob.escape(path) for path in chosen.paths])
    return folder / chosen.paths[0]


def _report_choice(repo: str, chosen: GgufFile, files: list[GgufFile]) -> None:
    others = ", ".join(name for name in names_of(files) if name != chosen.label)
    logger.warning("%s: using %s; others: %s", repo, chosen.label, others or "none")


class _Repository:
    """A repository on the hub, or what the cache has of it."""

    def __init__(self, repo: str, revision: str | None, cache_dir: str | Path | None) -> None:
        self.repo, self.revision = repo, revision
        self.cache = None if cache_dir is None else cache_directory(cache_dir) / "hub"

    def names(self) -> list[str]:
        """The paths of all files; offline, of those in the cache."""
        import huggingface_hub

        try:
            return huggingface_hub.list_repo_files(self.repo, revision=self.revision)
        except Exception as unreachable:
            try:
                folder = Path(self._download(["-"], (), is_local=True))  # any cached files
            except Exception:
                raise self._error(unreachable) from unreachable
            return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.gguf"))]

    def snapshot(self, patterns: Any, ignored: Any = ()) -> Path:
        """The directory with the files that match, downloaded if needed."""
        try:
            return Path(self._download(patterns, ignored, is_local=False))
        except Exception as unreachable:
            try:
                return Path(self._download(patterns, ignored, is_local=True))
            except Exception:
                raise self._error(unreachable) from unreachable

    def _download(self, patterns: Any, ignored: Any, *, is_local: bool) -> str:
        import huggingface_hub

        return huggingface_hub.snapshot_download(
            repo_id=self.repo,
            revision=self.revision,
            cache_dir=self.cache,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=is_local,
        )

    def _error(self, unreachable: Exception) -> ModelLoadError:
        why = (str(unreachable).strip().splitlines() or [type(unreachable).__name__])[0][:300]
        return ModelLoadError(
            f"model: {self.repo!r} is neither a local path nor cached, and the hub failed: "
            f"{why.removeprefix('Got: ')} ({HINT})"
        )
