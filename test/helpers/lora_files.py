"""LoRA adapters for tests: PEFT directories, GGUF files, and the merged weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model_files import gguf_name, permute_rows, write_safetensors

from llaisys.models.families import parse_config
from llaisys.models.loading.convert import Array
from llaisys.models.lora.files import base_linears

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)


@dataclass
class Lora:
    """Random matrices of an adapter by module; both differ from zero."""

    config: Mapping[str, Any]  # config.json of the base model
    rank: int = 8
    targets: Sequence[str] = ALL
    alpha: float = 16.0
    use_rslora: bool = False
    seed: int = 0
    strength: float = 0.5  # of the change, relative to a weight of norm one
    pairs: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1000 + self.seed)
        for module, linear in base_linears(parse_config(self.config)).items():
            if module.rsplit(".", 1)[1] in self.targets:
                a = rng.standard_normal((self.rank, linear.num_inputs), dtype=np.float32)
                b = rng.standard_normal((linear.num_outputs, self.rank), dtype=np.float32)
                size = self.strength / (self.scale * math.sqrt(self.rank * linear.num_inputs))
                self.pairs[module] = (a, b * np.float32(size))

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def merged(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """The weights of the base model with the adapter in them."""
        merged = dict(weights)
        for module, (a, b) in self.pairs.items():
            change = self.scale * (b.astype(np.float64) @ a.astype(np.float64))
            merged[f"{module}.weight"] = (weights[f"{module}.weight"] + change).astype(np.float32)
        return merged

    def tensors(self) -> dict[str, Array]:
        found = {}
        for module, (a, b) in self.pairs.items():
            found[f"base_model.model.{module}.lora_A.weight"] = a
            found[f"base_model.model.{module}.lora_B.weight"] = b
        return found

    def adapter_config(self, **changes: Any) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "use_rslora": self.use_rslora,
            "bias": "none",
            "modules_to_save": None,
            **changes,
        }

    def write_peft(self, directory: Path, dtype: str = "f32", **changes: Any) -> Path:
        """Write a PEFT directory; `changes`: of adapter_config.json."""
        directory.mkdir(parents=True, exist_ok=True)
        config = self.adapter_config(**changes)
        (directory / "adapter_config.json").write_text(json.dumps(config))
        write_safetensors(directory / "adapter_model.safetensors", self.tensors(), dtype)
        return directory

    def write_gguf(self, path: Path, kind: str = "F32", **metadata: str) -> Path:
        """Write a GGUF adapter as convert_lora_to_gguf.py does."""
        import gguf

        arch = self.config["model_type"]
        writer = gguf.GGUFWriter(path, arch)
        strings = {"general.type": "adapter", "adapter.type": "lora", **metadata}
        for key, value in strings.items():
            writer.add_string(key, value)
        writer.add_float32("adapter.lora.alpha", self.alpha)
        heads = {
            "q_proj": self.config["num_attention_heads"],
            "k_proj": self.config["num_key_value_heads"],
        }
        for module, (a, b) in self.pairs.items():
            name, last = gguf_name(f"{module}.weight"), module.rsplit(".", 1)[1]
            if arch == "llama" and last in heads:
                b = permute_rows(b, heads[last])
            for suffix, values in ((".lora_a", a), (".lora_b", b)):
                if kind == "F32":
                    writer.add_tensor(name + suffix, values)
                else:
                    writer.add_tensor(name + suffix, values.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
