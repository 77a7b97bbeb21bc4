"""NVTX ranges of a step, recorded by a library that NVTX injects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import tiny_config, write_hf_model

TOOLKITS = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", f"{shutil.which('nvcc')}/../.."]
SCRIPT = """
import sys
from llaisys import LLM, SamplingParams
with LLM(sys.argv[1], device=sys.argv[2], num_kv_blocks=20) as llm:
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([[5, 9, 2], [7] * 40], params)
"""


def test_stages_of_a_step_are_nested_ranges(tmp_path: Path) -> None:
    includes = [Path(toolkit, "include").resolve() for toolkit in TOOLKITS]
    include = next((path for path in includes if (path / "nvtx3/nvToolsExt.h").is_file()), None)
    if include is None:
        pytest.skip("needs the headers of the CUDA toolkit")
    recorder, record = tmp_path / "recorder.so", tmp_path / "ranges.txt"
    source = Path(__file__).parent / "native/nvtx_recorder.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-I{include}", "-o", recorder, source, "-ldl"], check=True
    )
    write_hf_model(tmp_path / "model", tiny_config(num_hidden_layers=2))
    environment = os.environ | {
        "LLAISYS_NVTX": "1",
        "NVTX_INJECTION64_PATH": str(recorder),
        "NVTX_RECORD": str(record),
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), "cuda"]
    subprocess.run(command, env=environment, check=True, timeout=120)
    ranges = set(record.read_text().splitlines())
    assert {
        "prepare/step",
        "prepare/step > attn_meta/build",
        "prepare/step > memcpy/inputs",
        "prepare/step > forward/model",
    } <= ranges
    assert {name.split("/")[0] for path in ranges for name in path.split(" > ")} == {
        "prepare", "attn_meta", "forward", "sample", "memcpy",
    }  # fmt: skip
