#!/usr/bin/env python3
"""Score of transformers on the questions of `llaisys bench questions`, greedy, in f32.

    scripts/score_answers.py [MODEL.gguf]    default: the default model

Needs transformers and torch. test/models/test_answers.py has the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from llaisys.bench.questions import QUESTIONS, is_right
from llaisys.diagnostics import fetch_model
from llaisys.models.families import open_checkpoint
from llaisys.tokenization import Tokenizer

MAX_TOKENS = 64


def main(arguments: list[str]) -> int:
    path = Path(fetch_model(arguments[0] if arguments else None))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
        ends = list(checkpoint.config.eos_token_ids)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question, _ in QUESTIONS
    ]
    width = max(map(len, prompts))
    outputs = model.generate(
        torch.tensor([[ends[0]] * (width - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in prompts]),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    right = 0
    for (question, pattern), ids in zip(QUESTIONS, outputs.tolist(), strict=True):
        answer = tokenizer.decode_tokens(ids[width:])
        right += is_right(pattern, answer)
        print("right" if is_right(pattern, answer) else "wrong", question, repr(answer[:80]))
    print(f"{right} of {len(QUESTIONS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
