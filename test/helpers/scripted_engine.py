"""The engine process of `scripted_server`: the first rule of the script whose words all stand in
the prompt says the answer. A token that a grammar forbids is replaced by the first that it allows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_fakes import FakeAdapter
from numpy.typing import NDArray
from script import CONTEXT, HELLO, SCRIPT

from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput, SamplingMetadata
from llaisys.models.base import AdapterOptions

TURN = "<|im_start|>assistant\n"
TOOL_NAME = re.compile(r'<tools>\s*\{"type": "function", "function": \{"name": "([^"]+)"')


class ScriptedAdapter(FakeAdapter):
    max_len = CONTEXT

    def __init__(self, checkpoint: Any, options: AdapterOptions) -> None:
        super().__init__(options)
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(Path(checkpoint.where) / "tokenizer.json"))
        self.eos = self.tokenizer.token_to_id("<|im_end|>")
        self.eos_token_ids = (self.eos,)
        self.vocab_size = 320
        self.rules = json.loads(Path(os.environ[SCRIPT]).read_text())
        self.rows: list[list[int]] = []  # what each output row has seen

    @classmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> ScriptedAdapter:
        return cls(checkpoint, options)

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        output = super().forward(step, attention)
        assert attention is not None
        size = self.options.kv_cache_block_size
        row_of = {seq: row for row, seq in enumerate(attention.batch_seq_ids.tolist())}
        self.rows = []
        for index in np.flatnonzero(step.logits_mask).tolist():
            length = int(step.positions[index]) + 1
            table = attention.block_tables[row_of[int(step.seq_ids[index])]]
            blocks = table[: -(-length // size)]
            self.rows.append(self.kv.reshape(-1, size)[blocks].reshape(-1)[:length].tolist())
        return output

    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        self.last_sampling = sampling
        self._sampled = []
        for index, row in enumerate(sampling.rows.tolist()):
            token = self._next(self.rows[row])
            tokens = [token, *range(3, self.vocab_size), self.eos]
            self._sampled.append(next(t for t in tokens if self._allowed(sampling, index, t)))
        return np.array(self._sampled, dtype=np.int32)

    def _next(self, seen: Sequence[int]) -> int:
        text = self.tokenizer.decode(list(seen), skip_special_tokens=False)
        prompt, _, said = text.rpartition(TURN)
        answer = next((r["say"] for r in self.rules if all(w in prompt for w in r["when"])), HELLO)
        tool = TOOL_NAME.search(prompt)
        answer = answer.replace("TOOL", tool[1]) if tool else answer
        script = self.tokenizer.encode(answer, add_special_tokens=False).ids
        begun = self.tokenizer.encode(said, add_special_tokens=False).ids
        return script[len(begun)] if len(begun) < len(script) else self.eos


def main() -> None:
    from llaisys.common.model_registry import MODEL_REGISTRY
    from llaisys.server.engine_client import process as engine_process

    MODEL_REGISTRY["qwen2"] = "scripted_engine:ScriptedAdapter"
    engine_process.main()


if __name__ == "__main__":
    main()
