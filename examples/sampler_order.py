"""The order of the sampler chain changes which tokens can be sampled.

With top_p before temperature, the nucleus is taken from the model's distribution and then
flattened; with temperature first, it is taken from the flattened distribution and has more tokens.

python examples/sampler_order.py [--model DIR_OR_NAME]
"""

from __future__ import annotations

import argparse

from llaisys import LLM, SamplingParams

ORDERS = {
    "top_p, then temperature": ["top_p", "temperature"],
    "temperature, then top_p": ["temperature", "top_p"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="directory, GGUF file or name")
    parser.add_argument("--prompt", default="The strangest animal is")
    arguments = parser.parse_args()

    with LLM(arguments.model, seed=0) as llm:
        for name, samplers in ORDERS.items():
            params = SamplingParams(
                n=4, temperature=2.0, top_p=0.8, samplers=samplers, seed=1, max_tokens=24
            )
            (output,) = llm.generate(arguments.prompt, params)
            print(name)
            for choice in output.outputs:
                print(f"  {choice.text!r}")


if __name__ == "__main__":
    main()
