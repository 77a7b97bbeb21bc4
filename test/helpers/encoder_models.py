"""Tiny random encoders of transformers with a WordPiece tokenizer, and their embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from reference_models import save

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat sat on mat dog ran ##s ##ing ##ed b c d e".split()
VOCAB = 113
POSITIONS = 96  # of a text
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "vocab_size": VOCAB,
    "attn_implementation": "eager",
}
# name -> (prefix of the classes, changes to the config)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"max_position_embeddings": POSITIONS}),
    "bert-tanh": ("Bert", {"max_position_embeddings": POSITIONS, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}),
    "xlm-roberta": (
        "XLMRoberta",
        {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1, "pad_token_id": 0},
    ),
}


def make_encoder(name: str, head: str = "Model", seed: int = 0, **sizes: Any) -> Any:
    """A model in f32. `head`: 'Model', 'ForMaskedLM' or 'ForSequenceClassification'."""
    prefix, changes = ENCODERS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **changes, **sizes})
    if head == "ForSequenceClassification":
        config.num_labels = 1
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + head)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "LayerNorm.weight" in label:
                parameter.copy_(1 + 0.1 * noise)
            else:
                scale = 0.1 if label.endswith("bias") else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
    return model.eval()


def save_encoder(model: Any, directory: Path, pooling: str = "", normalize: bool = True) -> Path:
    """Write the model with a tokenizer; `pooling`: mode of a sentence-transformers config."""
    save(model, directory)
    words = WORDS + [f"w{i}" for i in range(VOCAB - len(WORDS))]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    if pooling:
        kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
        modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        modules[1]["path"] = "1_Pooling"
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens")}
        modes.setdefault(f"pooling_mode_{pooling}", True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return directory


def write_encoder_gguf(model: Any, path: Path, pooling: int = 1) -> None:
    """As llama.cpp's converter, in Q8_0; replaces the matrices of `model` by their dequantised
    values."""
    config, qtype = model.config, gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "bert")
    first = config.max_position_embeddings - POSITIONS
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    words = WORDS + [f"w{i}" for i in range(config.vocab_size - len(WORDS))]
    control = [word.startswith("[") for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [
            word if special else word[2:] if word.startswith("##") else "\u2581" + word
            for word, special in zip(words, control, strict=True)
        ]
    )
    writer.add_token_types([3 if special else 1 for special in control])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        own = name.removeprefix(f"{model.base_model_prefix}.")
        if own.startswith("pooler.") or own.endswith("_ids"):
            continue
        target = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert target is not None, own
        values = parameter.numpy()
        if target in ("position_embd.weight", "token_types.weight", "cls.output.weight"):
            writer.add_tensor(target, values[first:] if target[0] == "p" else values)
        elif values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            blocks = gguf.quantize(values, qtype)
            writer.add_tensor(target, blocks, raw_dtype=qtype)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.array(gguf.dequantize(blocks, qtype))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hidden_states(model: Any, tokens: list[int]) -> NDArray[np.float64]:
    """[tokens, hidden size] of the last layer."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        found = base(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)))
    return found.last_hidden_state[0].double().numpy()
