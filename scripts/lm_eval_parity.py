#!/usr/bin/env python3
"""Compare lm-eval's scores through this server with those of its transformers back end.

    pip install "lm_eval[api]" torch transformers accelerate
    python scripts/lm_eval_parity.py MODEL [--limit 40]

MODEL: a Hugging Face directory (f32, so that results agree), or a .gguf file, which transformers
first converts to one. The task is defined here, so that nothing is downloaded: choose the capital
of a country among six cities (`local-completions`: echo, logprobs, max_tokens), and name it
(`local-chat-completions`). Exit status 1 when a score differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CAPITALS = """
    France Paris;Germany Berlin;Italy Rome;Spain Madrid;Portugal Lisbon;Austria Vienna;Greece Athens
    Poland Warsaw;Hungary Budapest;Norway Oslo;Sweden Stockholm;Finland Helsinki;Denmark Copenhagen
    Ireland Dublin;Belgium Brussels;Switzerland Bern;Russia Moscow;Ukraine Kyiv;Turkey Ankara
    Egypt Cairo;Kenya Nairobi;Ghana Accra;Nigeria Abuja;Morocco Rabat;Japan Tokyo;China Beijing
    India Delhi;Thailand Bangkok;Vietnam Hanoi;Indonesia Jakarta;Australia Canberra;Canada Ottawa
    Mexico Mexico;Cuba Havana;Brazil Brasilia;Peru Lima;Chile Santiago;Iran Tehran;Iraq Baghdad
    Israel Jerusalem
"""
CHOICES = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Last year, far away from {{country}}, I met a man who was born in"
doc_to_choice: "{{cities}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """
task: capitals_said
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{country}}?"
doc_to_target: "{{cities[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 16, do_sample: false}
filter_list:
  - name: last_name
    filter: [{function: regex, regex_pattern: "([A-Z][a-z]+)[^A-Za-z]*$"}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""


def write_tasks(folder: Path) -> None:
    pairs = [entry.split() for entry in re.split(r"[;\n]", CAPITALS) if entry.strip()]
    cities = [city for _, city in pairs]
    lines = []
    for number, (country, city) in enumerate(pairs):
        others = [cities[(number + step) % len(cities)] for step in (1, 7, 13, 22, 28)]
        others.insert(number % 6, city)
        lines.append(json.dumps({"country": country, "cities": others, "answer": number % 6}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
        text = text.replace("DATA", str(folder / "data.jsonl"))
        (folder / f"{name}.yaml").write_text(text)


def as_directory(model: Path, folder: Path) -> Path:
    if model.is_dir():
        return model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": model.name}
    found = AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.float32, **where)
    if hasattr(found.config, "quantization_config"):
        del found.config.quantization_config
    plain = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32)
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(model.parent, **where).save_pretrained(folder / "model")
    return folder / "model"


def evaluate(folder: Path, kind: str, arguments: str, task: str, limit: int, chat: bool) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        limit=limit,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
        batch_size=1,
    )


def serve(model: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = ["serve", str(model), "--port", "0", "--served-model-name", "model"]
    process = subprocess.Popen(
        [sys.executable, "-m", "llaisys", *command, "--session-file", str(folder / "s.db")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("llaisys: serving"):
            return process, line.split()[-1]
    raise SystemExit("the server did not start")


def scores(result: Any, task: str) -> dict[str, float]:
    found = result["results"][task].items()
    return {
        name.partition(",")[0]: round(float(value), 4)
        for name, value in found
        if isinstance(value, float) and "stderr" not in name
    }


def loglikelihoods(result: Any, task: str) -> list[float]:
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    return [float(r[0]) for sample in samples for r in sample["filtered_resps"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=int, default=40, help="questions")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["OPENAI_API_KEY"] = "none"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        write_tasks(folder)
        model = as_directory(args.model.resolve(), folder)
        own = f"pretrained={model},dtype=float32,device=cpu"
        shared = f"model=model,tokenizer={model},num_concurrent=1,max_retries=1"
        process, url = serve(model, folder)
        try:
            differ = False
            for task, kind, path, chat in (
                ("capitals", "local-completions", "/v1/completions", False),
                ("capitals_said", "local-chat-completions", "/v1/chat/completions", True),
            ):
                ours = evaluate(
                    folder, kind, f"{shared},base_url={url}{path}", task, args.limit, chat
                )
                theirs = evaluate(folder, "hf", own, task, args.limit, chat)
                differ |= scores(ours, task) != scores(theirs, task)
                print(f"{task}: {kind} {scores(ours, task)}, hf {scores(theirs, task)}")
                if not chat:
                    pairs = zip(
                        loglikelihoods(ours, task), loglikelihoods(theirs, task), strict=True
                    )
                    most = max(abs(a - b) for a, b in pairs)
                    print(f"{task}: loglikelihoods differ by at most {most:.2g}")
        finally:
            process.terminate()
            process.wait(30)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
