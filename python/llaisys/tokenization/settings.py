"""tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a model directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.chat_template import MAX_TEMPLATE_CHARS
from llaisys.tokenization.json_file import read_bytes, read_optional_json_object
from llaisys.tokenization.unicode_text import clean_text

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Tokenizer settings besides the vocabulary."""

    chat_templates: dict[str, str]  # by name; 'default' is used without tools
    special_tokens: dict[str, str]  # 'bos_token' -> '<s>', ...: template variables
    raw: dict[str, Any]  # tokenizer_config.json


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the settings; absent files count as empty. Code in `auto_map` is never imported."""
    raw = read_optional_json_object(directory / "tokenizer_config.json")
    special = read_optional_json_object(directory / "special_tokens_map.json")
    tokens = {}
    for name in _SPECIAL_NAMES:
        text = special_text(raw.get(name)) or special_text(special.get(name))
        if text is not None:
            tokens[name] = text
    return TokenizerSettings(_templates(directory, raw.get("chat_template")), tokens, raw)


def special_text(value: object) -> str | None:
    """The text of a special token."""
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return clean_text(value) if isinstance(value, str) else None


def _templates(directory: Path, value: object) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        data = read_bytes(path, 4 * MAX_TEMPLATE_CHARS)
        try:
            return {"default": data.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: not UTF-8: {error.reason}") from error
    if isinstance(value, str):
        return {"default": clean_text(value)}
    templates = {}
    for entry in value if isinstance(value, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        name, text = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(text, str) or not name:
            raise ModelLoadError(f"{directory}: tokenizer_config.json: bad 'chat_template' entry")
        templates[name] = clean_text(text)
    return templates
