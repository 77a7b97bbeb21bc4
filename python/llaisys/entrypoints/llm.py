"""`LLM`: offline inference in a few lines.

with LLM() as llm:
    for output in llm.generate(["The sea is", "Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.text)
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llaisys.chat.records import ChatAnswer
from llaisys.chat.style import ChatStyle
from llaisys.chat.tools import read_tools
from llaisys.common.closing import Closing
from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.sampling import SamplingParams, sampling_defaults
from llaisys.common.types import CompletionOutput, RequestOutput, StreamOutput
from llaisys.common.validation import invalid_value
from llaisys.engine.config import EngineConfig
from llaisys.engine.engine_flags import engine_parameters
from llaisys.engine.input_processor import normalize_message
from llaisys.engine.llm_engine import LLMEngine
from llaisys.entrypoints.prompts import (
    Lora,
    Params,
    Prompt,
    PromptCalls,
    Work,
    as_batch,
    as_loras,
    as_params,
    deferred_interrupt,
    progress_bar,
)

Messages = Sequence[Mapping[str, Any]]


class LLM(PromptCalls, Closing):
    """An engine in this process. Not thread-safe; `close()` or a `with` block frees it.

    `generate` and `stream` are built on `submit`, `step` and `collect`: a finished output is
    retained until `collect` returns it.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """`model`: a directory, a GGUF file or a model's name; None: the default model.

        `options` are the fields of `llaisys.engine.config.EngineConfig` and its sections, by name
        (`dtype`, `max_model_len`, `kv_cache_memory_bytes`, ...; `help(LLM)` lists them with their
        defaults), `tokenizer` and `adapter_class`. An unknown name is a TypeError.
        """
        path = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = EngineConfig.of(model=path, **options)
        self._finished: dict[str, RequestOutput] = {}  # until collected
        self._streams: dict[str, deque[StreamOutput]] = {}  # outputs not yet yielded
        self._dropped: list[str] = []  # request ids of garbage-collected streams
        self._style: ChatStyle | None = None
        self._engine: LLMEngine | None = None
        self._engine = LLMEngine(config)

    # ---- the model -----------------------------------------------------------------------------

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, to look into its parts; they may change with every version."""
        if self._engine is None:
            raise ClosedError("this LLM is closed")
        while self._dropped:
            name = self._dropped.pop()
            self._streams.pop(name, None)
            self._abandon([name])
        return self._engine

    @property
    def model_path(self) -> str:
        """Path of the model's files."""
        return self.llm_engine.model_info.model_path

    @property
    def model_info(self) -> Any:
        """Limits and sizes: a `llaisys.common.types.ModelInfo`."""
        return self.llm_engine.model_info

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling defaults of `generate`, `chat` and `stream` without SamplingParams: those of the
        model's files, or else those of a table of known models, or else temperature 0.8, top-k 40,
        top-p 0.95, min-p 0.05.

        Fields that are missing in given SamplingParams have the model's value or else the neutral
        one (temperature 1, no truncation); `.with_defaults(llm.default_sampling)` fills them in
        from here instead."""
        return sampling_defaults(self.model_info.generation_defaults)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; None when the model has none."""
        return self.llm_engine.tokenizer

    @property
    def chat_style(self) -> ChatStyle:
        """Tool-call and reasoning formats of the chat template."""
        if self._style is None:
            self._style = ChatStyle.of(self.llm_engine.tokenizer)
        return self._style

    def read_answer(
        self,
        output: CompletionOutput | str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> ChatAnswer:
        """Parse an answer of `chat` into `content`, `reasoning` and, with `tools`, `tool_calls`.
        `prompt_token_ids` (of the RequestOutput) determine whether the prompt ends inside the
        reasoning; default: those of an empty chat."""
        style, tokenizer = self.chat_style, self._need_tokenizer()
        if prompt_token_ids is None:
            prompt_token_ids = self.encode_chat([{"role": "user", "content": ""}])
        opened = style.opens_reasoning(tokenizer, prompt_token_ids)
        text = output if isinstance(output, str) else output.text
        return style.reader(read_tools(tools), opened).read(text)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self._need_tokenizer().encode(text, add_special_tokens)

    def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, rendered by the chat template. For a template without
        tools, they are described in the system prompt; see docs/guides/tools.md."""
        engine = self.llm_engine
        prepared: Messages = messages
        listed = None
        if isinstance(messages, (list, tuple)):  # others are rejected below
            plain = [normalize_message(message, number) for number, message in enumerate(messages)]
            prepared, listed = self.chat_style.prepare(plain, read_tools(tools))
        return engine.encode_chat(
            prepared,
            add_generation_prompt=add_generation_prompt,
            tools=listed,
            variables=chat_template_kwargs,
        )

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._need_tokenizer().decode_tokens(token_ids, skip_special_tokens)

    # ---- complete answers ----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        lora: Lora = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (texts or token ids); outputs are in the order of prompts.
        `lora`: the name of a LoRA adapter, or a list with one (or None) per prompt.

        Every prompt is checked before any runs. When it is interrupted, everything that it
        submitted is cancelled and released.
        """
        batch = as_batch(prompts)
        params = as_params(sampling_params, len(batch))
        loras = as_loras(lora, len(batch))
        return self._run(list(zip(batch, params, strict=True)), cache_salt, use_tqdm, loras=loras)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        lora: Lora = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; a message is {"role": ..., "content": ...}."""
        if isinstance(messages, (str, Mapping)) or not messages:
            raise invalid_value("messages", messages, "a list of {'role', 'content'}, not empty")
        many = not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if many else [messages]
        prompts: list[Prompt] = [
            self.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        params = as_params(sampling_params, len(prompts))
        visible_ids = self.chat_style.visible_ids(self.tokenizer, read_tools(tools))
        loras, work = as_loras(lora, len(prompts)), list(zip(prompts, params, strict=True))
        return self._run(work, cache_salt, use_tqdm, visible_ids, loras)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        is_chat: bool = False,
        lora: str | None = None,
    ) -> TokenStream:
        """Stream one answer; a list of messages is a chat. The prompt is checked immediately.
        Closing or dropping the stream cancels the request. `is_chat`: `prompt` has the token ids
        of a chat, whose reasoning markers are part of the text."""
        engine = self.llm_engine
        visible_ids: frozenset[int] = frozenset()
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            ids: Prompt = self.encode_chat(prompt)  # type: ignore[arg-type]
            is_chat = True
        else:
            ids = prompt  # type: ignore[assignment]
        if is_chat:
            visible_ids = self.chat_style.visible_ids(self.tokenizer, None)
        request_id = engine.submit(
            ids,
            sampling_params,
            stream=True,
            cache_salt=cache_salt,
            visible_ids=visible_ids,
            lora=lora,
        )
        self._streams[request_id] = deque()
        return TokenStream(self, request_id)

    # ---- LoRA adapters -------------------------------------------------------------------------

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return self.llm_engine.loras

    def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """Load a LoRA adapter: a PEFT directory, a GGUF file or a hub id. Needs `enable_lora` or
        `lora_modules`. `in_place`: replace the adapter of that name. Raises ModelLoadError."""
        self.llm_engine.load_lora(name, os.fspath(path), in_place)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Its running requests finish, new ones are rejected."""
        self.llm_engine.unload_lora(name)

    # ---- step by step --------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> str:
        """Queue a prompt and return its request id. With `stream`, `step` returns partial
        outputs."""
        if request_id is not None and request_id in self._finished:
            raise invalid_value("request_id", request_id, "one without an output to collect")
        return self.llm_engine.submit(
            prompt, sampling_params, request_id, stream, cache_salt, lora=lora
        )

    def step(self) -> list[StreamOutput]:
        """Run one step for all running requests and return the new outputs."""
        engine = self.llm_engine
        if not engine.has_unfinished():
            return []
        with deferred_interrupt():
            outputs = engine.step()
            self._route(outputs)
        return outputs

    def collect(self, request_id: str) -> RequestOutput | None:
        """The output of a finished request, returned once; None: not finished or unknown."""
        return self._finished.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Its output so far, with finish_reason `abort`, can be collected. False:
        not running."""
        outputs = self.llm_engine.cancel(request_id)
        self._route(outputs)
        return bool(outputs)

    def has_unfinished(self) -> bool:
        return self.llm_engine.has_unfinished()

    def stats(self) -> dict[str, Any]:
        """Counters: steps, queue lengths, KV blocks, prefix cache hits, preemptions, errors."""
        return self.llm_engine.stats()

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """Seconds per stage of the worker and milliseconds per step outside native code."""
        return self.llm_engine.profile(reset)

    def close(self) -> None:
        """Free the model. Idempotent."""
        engine, self._engine = self._engine, None
        self._finished.clear()
        self._streams.clear()
        if engine is not None:
            engine.close()

    # ---- internal ------------------------------------------------------------------------------

    def _run(
        self,
        work: list[Work],
        cache_salt: str | None,
        use_tqdm: bool,
        visible_ids: frozenset[int] = frozenset(),
        loras: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        names: list[str] = []
        options: dict[str, Any] = {"cache_salt": cache_salt, "visible_ids": visible_ids}
        try:
            for (prompt, params), lora in zip(work, loras or [None] * len(work), strict=True):
                with deferred_interrupt():
                    names.append(engine.submit(prompt, params, lora=lora, **options))
            waiting = set(names)
            with progress_bar(len(names), use_tqdm) as advance:
                while waiting:
                    done = {out.request_id for out in self.step() if out.output is not None}
                    done &= waiting
                    waiting -= done
                    advance(len(done))
            return [self._finished.pop(name) for name in names]
        except BaseException:
            self._abandon(names)
            raise

    def _abandon(self, names: list[str]) -> None:
        """Cancel the running requests of `names` and discard their outputs."""
        with deferred_interrupt():
            for name in names:
                if self._engine is not None:
                    self._engine.cancel(name)
                self._finished.pop(name, None)

    def _route(self, outputs: list[StreamOutput]) -> None:
        for part in outputs:
            if part.output is not None:
                self._finished[part.request_id] = part.output
            waiting = self._streams.get(part.request_id)
            if waiting is not None:
                waiting.append(part)

    def _need_tokenizer(self) -> Any:
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise InvalidInputError("this model has no tokenizer", field="tokenizer")
        return tokenizer


LLM.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *engine_parameters(),
    ]
)


class TokenStream(Iterator[StreamOutput], Closing):
    """Iterator over the partial outputs of one request, created by `LLM.stream`. Advancing it steps
    all requests."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self.request_id = request_id
        self._llm: LLM | None = llm

    def __next__(self) -> StreamOutput:
        llm = self._llm
        if llm is None:
            raise StopIteration
        parts = llm._streams.get(self.request_id)
        try:
            while not parts:
                if not llm.has_unfinished():  # raises for a closed LLM
                    raise StopIteration
                llm.step()
        except BaseException:
            self.close()
            raise
        part = parts.popleft()
        if part.output is not None:
            self.close()
        return part

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm._streams.pop(self.request_id, None)
            llm._abandon([self.request_id])

    def __del__(self) -> None:
        if self._llm is not None:  # possibly during a step: only record the id
            self._llm._dropped.append(self.request_id)
