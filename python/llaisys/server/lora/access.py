"""Who may change adapters at run time, and which files may be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import Request

from llaisys.common.validation import check_text, invalid_value
from llaisys.server.errors import ApiError
from llaisys.server.service import service_of


def require_admin(request: Request) -> None:
    """Raise ApiError 403 unless adapters may be changed at run time with the key of this request.
    Without API keys every client may."""
    service = service_of(request)
    if not service.config.allowed_lora_paths:
        raise ApiError(
            403,
            "LoRA adapters are not changed at run time; --allowed-lora-path DIR allows it",
            code="lora_updates_off",
        )
    if len(service.keys) and not service.keys.is_admin(request.scope["state"]["owner"]):
        raise ApiError(
            403, 'this needs an API key with "admin": true in --api-key-file', code="not_admin"
        )


def allowed_path(given: str, roots: Sequence[Path]) -> Path:
    """The real path of an adapter below one of `roots`; relative paths start there. Links are
    followed first, so they do not lead outside. Raises InvalidInputError."""
    text = check_text("lora_path", given)
    limit = "a PEFT directory or a GGUF file below one of the directories of --allowed-lora-path"
    if "://" in text or "\0" in text:
        raise invalid_value("lora_path", text, limit)
    for root in roots:
        base = root.expanduser().resolve()
        try:
            path = (base / text).resolve()
            if path != base and path.is_relative_to(base) and path.exists():
                return path
        except OSError:  # such as a name that is too long
            continue
    raise invalid_value("lora_path", text, limit)
