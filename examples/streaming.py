"""Stream an answer to the terminal.

python examples/streaming.py "Why is the sky blue?" [--model DIR_OR_NAME]
"""

from __future__ import annotations

import argparse

from llaisys import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--model", default=None, help="directory, GGUF file or name")
    arguments = parser.parse_args()

    messages = [{"role": "user", "content": arguments.question}]
    with LLM(arguments.model) as llm:
        for part in llm.stream(messages, SamplingParams(max_tokens=256)):
            print(part.text, end="", flush=True)
            if part.output is not None:
                seconds = part.output.outputs[0].timings.first_token or 0.0
                print(f"\n[{part.finish_reason}; first token after {seconds:.2f} s]")


if __name__ == "__main__":
    main()
