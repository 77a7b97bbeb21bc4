"""Peak memory of loading a mixture of experts: experts are read one after the other."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np

from llaisys.models.families import file_tensors, parse_config

MIB = 1 << 20
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 4000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
LOAD = """
import sys
from llaisys.common.model_registry import get_adapter_class
from llaisys.libllaisys.library import lib
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint

def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

lib()
with open_checkpoint(sys.argv[1]) as checkpoint:
    adapter_class = get_adapter_class(checkpoint.config.model_type)
    before = kib("VmRSS")
    options = AdapterOptions(
        kv_cache_capacity_tokens=64, max_model_len=64, max_batch_tokens=16, n_threads=2
    )
    adapter_class.load(checkpoint, options).close()
    print(kib("VmHWM") - before)
"""


def write(directory: Path) -> int:
    """Write a model with small random weights; returns the bytes of its tensors."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    header, at = {}, 0
    for name, shape in file_tensors(parse_config(CONFIG)):
        end = at + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32).view(np.uint32)
    bits = (noise >> 16).astype(np.uint16).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(bits)):
            file.write(bits[: at - start])
    return at


def test_peak_of_loading_is_the_file_and_a_tenth(tmp_path: Path) -> None:
    size = write(tmp_path)
    assert size > 200 * MIB
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The memory of the KV cache, of the activations and of reading the header is not the weights'.
    assert int(done.stdout) * 1024 < 1.1 * size + 16 * MIB
