"""--chat-template: a file or a text that replaces the model's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_helpers import invalid_input, naming
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess

from llaisys import LLM
from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.engine.config import EngineConfig

OWN = "{% for m in messages %}({{ m.role }}:{{ m.content }}){% endfor %}"
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "model"
    write_hf_model(path, tiny_config())
    return path


def test_template_text_or_file_replaces_the_model_template(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    for given in (OWN, str(file)):
        with LLM(model, chat_template=given) as llm:
            assert llm.detokenize(llm.encode_chat(SAID), False) == "(user:hi)"
            assert llm.tokenizer.chat_template == OWN


def test_server_uses_the_chat_template(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    with (
        ServerProcess(str(model), "--chat-template", str(file), real=True) as server,
        server.wait_ready().client() as client,
    ):
        answer = client.post("/apply-template", json={"messages": SAID})
        assert answer.json()["prompt"] == "(user:hi)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("no such file", r"chat_template is 'no such file'; .*a file that has one \(No such file"),
        ("{" * 65537, "chat_template has 65537 characters; it must have at most 65536"),
        ("", "chat_template is ''"),
        (5, "chat_template is 5"),
    ],
)
def test_invalid_template_is_rejected_at_start(given: object, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        EngineConfig(chat_template=given)  # type: ignore[arg-type]


def test_missing_template_file_is_rejected(tmp_path: Path) -> None:
    for name, content in (("plain", b"no braces"), ("bytes", b"\xff{")):
        (tmp_path / name).write_bytes(content)
        with invalid_input("chat_template"):
            EngineConfig(chat_template=str(tmp_path / name))


def test_template_with_syntax_error_fails_at_start(model: Path) -> None:
    with naming(ModelLoadError, "TemplateSyntaxError"):
        LLM(model, chat_template="{% for %}")
