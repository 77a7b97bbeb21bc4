#!/usr/bin/env python3
"""Run the HTTP tests of vLLM, from its source tree, against this server.

    scripts/run_vllm_tests.py VLLM --model FILE.gguf [arguments of pytest]

VLLM is a checkout of vLLM; its files are not changed and its package is not imported: `vllm` is
replaced by empty modules and `tests.utils` by a module whose `RemoteOpenAIServer` starts
`llaisys serve`. Every test has the same model, SmolLM2-135M-Instruct, under the name that the test
uses; a small random model replaces base models and dummy weights, a random LoRA adapter those of
the hub. Tests that start no server test classes of vLLM and are left out, as are those in LEFT_OUT.
Needs pytest-asyncio and anthropic. The last lines are a table of counts by file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest.mock import MagicMock

from peer_tests import ROOT, Servers, run

sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test" / "helpers")]
FILES = (
    "openai",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "anthropic/test_messages.py",
)
# Tests of these files that are not counted: what each needs beside HTTP and a text model.
LEFT_OUT = {
    "correctness/test_lmeval.py": "the accuracy of Qwen2-1.5B on the GPU",
    "responses/test_harmony.py": "gpt-oss-20b",
    "responses/test_harmony_utils.py": "classes of vLLM",
    "test_serving_chat.py": "gpt-oss-20b, classes of vLLM",
    "responses/test_mcp_tools.py": "gpt-oss-20b and an MCP server in the process",
    "responses/test_parsable_context.py": "Qwen3-8B and an MCP server in the process",
    "test_tensorizer_entrypoint.py": "files of tensorizer",
    "test_return_routed_experts.py": "a mixture of experts that reports its routing",
    "with_prompt_embeds.py": "tensors of torch as prompts",
    "test_extra_content_fields.py": "TranslateGemma, images",
    "test_lora_resolvers.py": "plugins of vLLM",
    "test_dp_supervisor.py": "processes of vLLM",
    "test_run_batch.py": "vLLM's program for batches",
    "test_openai_schema.py": "the fuzzer's cases depend on the schema of vLLM's server",
    "test_thinking_token_budget_qwen35_fp8_mtp_concurrent_mixed_budget_and_plain": "two GPUs",
    # numbers of another tokenizer
    "test_chat.py::test_single_chat_session": "token counts of Zephyr",
    "test_completion.py::test_single_completion": "token counts of OPT",
    "test_orca_metrics.py::test_single_completion": "token counts of Qwen3",
    "test_thinking_token_budget_limits_reasoning": "the </think> token of Qwen3",
    # answers that a model of 135 million parameters without reasoning does not give
    "test_include_reasoning.py": "reasoning of Qwen3 0.6B",
    "test_function_tool_use[True-": "reasoning of Qwen3 0.6B before a call",
    "test_function_tool_use[False-auto": "a call by Qwen3 0.6B",
    "test_return_token_ids.py::test_chat_completion_with_tool_use": "a call by Qwen2.5 1.5B",
    "test_messages.py::test_anthropic_tool_call": "a call by Qwen3 0.6B",
    "test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs":
        "a text of Qwen2.5 1.5B that does not end at once",
    "test_completion.py::test_parallel_no_streaming": "texts of OPT 125M that end",
    "test_chat.py::test_more_than_one_prompt_logprobs_chat": "the likeliest token of Zephyr 7B",
    "test_chat.py::test_complex_message_content": "an answer of Zephyr 7B",
    "test_chat.py::test_structured_outputs_json_chat": "two different answers of Zephyr 7B",
    "test_chat.py::test_structured_outputs_regex_chat": "two different answers of Zephyr 7B",
    "responses/test_basic.py::test_simple_input": "arithmetic and reasoning of Qwen3 1.7B",
    "responses/test_basic.py::test_instructions": "arithmetic of Qwen3 1.7B",
    "responses/test_basic.py::test_chat": "arithmetic of Qwen3 1.7B",
    "test_function_call.py::test_function_tool_use": "reasoning of Qwen3 1.7B before a call",
    "test_function_calling_with_streaming_expected_arguments": "a call by Qwen3 1.7B",
    "responses/test_simple.py::test_reasoning_item": "reasoning of Qwen3 8B",
    "test_streaming_reasoning_tokens_e2e": "reasoning of Qwen3 8B",
    "test_non_streaming_reasoning_tokens_e2e": "reasoning of Qwen3 8B",
    "responses/test_stateful.py::test_previous_response_id": "an answer of Qwen3 1.7B",
    "responses/test_stateful.py::test_two_responses_with_same_prev_id": "an answer of Qwen3 1.7B",
}  # fmt: skip
# Options of `vllm serve` without an equivalent here.
SWITCHES = ("--enforce-eager", "--enable-chunked-prefill", "--enable-auto-tool-choice",
            "--no-async-scheduling", "--trust-remote-code", "--skip-tokenizer-init",
            "--enable-prompt-tokens-details", "--enable-server-load-tracking",
            "--enable-tokenizer-info-endpoint")  # fmt: skip
VALUES = ("--gpu-memory-utilization", "--structured-outputs-config.backend", "--load-format",
          "--reasoning-config", "--reasoning-parser", "--tool-call-parser", "--port",
          "--dtype")  # fmt: skip
SMOLLM2 = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152,
           "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "intermediate_size": 1536,
           "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
           "hidden_act": "silu", "tie_word_embeddings": True}  # fmt: skip
MAX_LENGTH = 2048  # of the context: this model sometimes repeats itself until it is full
LONG = ("test_tokenization.py", "test_chunked_prompt.py")  # these need theirs
BASE = ("facebook/opt-125m", "openai-community/gpt2")
EMPTY = ("vllm", "openai_harmony", "pybase64")  # packages whose classes no counted test uses


class Files:
    """The model, its variants, and their tokenizer."""

    def __init__(self, model: Path, made: Path) -> None:
        self.model = model
        self.made = made

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model.parent, gguf_file=self.model.name)

    @functools.cached_property
    def base(self) -> Path:
        """A small random model with the same tokenizer: as the base models of the tests it does not
        end its texts."""
        from transformers import LlamaConfig, LlamaForCausalLM

        small = {"hidden_size": 72, "num_hidden_layers": 2, "intermediate_size": 96}
        LlamaForCausalLM(LlamaConfig(**SMOLLM2 | small)).save_pretrained(self.made / "base")
        self.tokenizer.save_pretrained(self.made / "base")
        return self.made / "base"

    @functools.cached_property
    def adapter(self) -> str:
        from lora_files import Lora  # type: ignore[import-not-found]

        return str(Lora(SMOLLM2, strength=0.01).write_peft(self.made / "adapter"))

    def options(self, name: str, arguments: Sequence[str]) -> list[str]:
        """The options of `llaisys serve` for the arguments of `vllm serve`."""
        is_base = name in BASE or "--load-format" in arguments  # dummy weights
        options = ["--model", str(self.base if is_base else self.model)]
        items = iter(arguments)
        for item in items:
            option, has_value, value = item.partition("=")
            if option in SWITCHES:
                continue
            if option in VALUES:
                _ = value if has_value else next(items)
            elif option == "--max_model_len":
                options.append("--max-model-len")
            else:
                options.append(item)
        if not any(name in os.environ.get("PYTEST_CURRENT_TEST", "") for name in LONG):
            for at, option in enumerate(options[:-1], 1):
                if option == "--max-model-len":
                    options[at] = str(min(int(options[at]), MAX_LENGTH))
        if "--served-model-name" not in options:
            options += ["--served-model-name", name]
        return options


class RemoteOpenAIServer:
    """What vLLM's tests use of the class with this name."""

    DUMMY_API_KEY = "token-abc123"
    servers: ClassVar[Servers]
    files: ClassVar[Files]

    def __init__(self, model: str, arguments: list[str], **settings: Any) -> None:
        options = self.files.options(model, arguments)
        if key := (settings.get("env_dict") or {}).get("VLLM_API_KEY"):
            options += ["--api-key", key]
        self.host = "127.0.0.1"
        self.port = self.servers.start(options)
        self.servers.wait_ready(self.port)
        self.url_root = f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, package: str, kind: str, *path: str, **settings: Any) -> Any:
        settings = {"timeout": 600, "max_retries": 0, "api_key": self.DUMMY_API_KEY, **settings}
        return getattr(importlib.import_module(package), kind)(
            base_url=self.url_for(*path), **settings
        )

    def get_client(self, **settings: Any) -> Any:
        return self._client("openai", "OpenAI", "v1", **settings)

    def get_async_client(self, **settings: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", "v1", **settings)

    def get_async_client_anthropic(self, **settings: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", **settings)


class EmptyModule(types.ModuleType):
    """A package in which every name is an object without behaviour."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM; `attributes` by module have behaviour."""

    def __init__(self, attributes: dict[str, dict[str, Any]]) -> None:
        self.attributes = attributes

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != "tests.utils" and name.partition(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.attributes.get(module.__name__, {}))


class Selection:
    """A plugin of pytest: the tests that start a server and are not in LEFT_OUT."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if any(str(collection_path).endswith(name) for name in LEFT_OUT) else None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self.counts(item)]

    def counts(self, item: Any) -> bool:
        test = item.nodeid.partition("[")[0]
        if any(test.endswith(name) or ("[" in name and name in item.nodeid) for name in LEFT_OUT):
            return False
        fixtures = " ".join(item.fixturenames)
        return (
            "server" in fixtures
            or "client" in fixtures
            or "RemoteOpenAIServer(" in inspect.getsource(item.function)
        )


def attributes(files: Files) -> dict[str, dict[str, Any]]:
    """What the tests use of vLLM's modules."""
    from llaisys.server.generation.service import VERSION

    platform = types.SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: False, device_count=lambda: 0
    )
    hub = types.SimpleNamespace(snapshot_download=lambda **_: files.adapter)
    config = types.SimpleNamespace(get_vocab_size=lambda: SMOLLM2["vocab_size"])
    envs = types.SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
    return {
        "vllm": {"envs": envs},
        "vllm.config": {"ModelConfig": lambda **_: config},
        "vllm.model_executor.model_loader.weight_utils": {
            "download_weights_from_hf": lambda name, **_: name
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.tokenizers": {"get_tokenizer": lambda **_: files.tokenizer},
        "vllm.transformers_utils.repo_utils": {"hf_api": lambda: hub},
        "vllm.version": {"__version__": VERSION},
        "tests.utils": {
            "RemoteOpenAIServer": RemoteOpenAIServer,
            "multi_gpu_only": lambda **_: lambda test: test,
            "requires_fp8": lambda test: test,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=None)
    known, rest = parser.parse_known_args()
    model = known.model.resolve()
    logs = known.logs.resolve() if known.logs else None
    os.chdir(known.vllm)
    sys.path.insert(0, ".")
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = "tests/entrypoints"
    settings = ["-c", os.devnull, "--rootdir", ".", "--confcutdir", folder]
    settings += ["-p", "no:cacheprovider", "-p", "pytest_asyncio", "-W", "ignore"]
    if all(argument.startswith("-") for argument in rest):
        rest += [f"{folder}/{name}" for name in FILES]
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as name:
        RemoteOpenAIServer.files = Files(model, Path(name))
        RemoteOpenAIServer.servers = Servers(logs or Path(name))
        sys.meta_path.insert(0, Finder(attributes(RemoteOpenAIServer.files)))
        return run(settings, rest, RemoteOpenAIServer.servers, Selection())


if __name__ == "__main__":
    sys.exit(main())
