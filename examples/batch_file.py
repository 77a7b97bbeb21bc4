"""Complete every line of a text file in one batch; writes JSON lines with usage and timings.

python examples/batch_file.py prompts.txt answers.jsonl [--model DIR_OR_NAME]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from llaisys import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="one prompt per line")
    parser.add_argument("answers", type=Path, help="JSON lines, in the prompts' order")
    parser.add_argument("--model", default=None, help="directory, GGUF file or name")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    prompts = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    with LLM(arguments.model) as llm, arguments.answers.open("w", encoding="utf-8") as file:
        for output in llm.generate(prompts, params, use_tqdm=True):
            record = {
                "prompt": output.prompt,
                "text": output.text,
                "finish_reason": output.finish_reason,
                "usage": asdict(output.usage),
                "timings": asdict(output.outputs[0].timings),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
