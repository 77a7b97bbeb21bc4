"""Llama, Mistral, Mixtral, SmolLM3 and Code World Model."""

from dataclasses import replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.experts import ExpertFamily
from llaisys.models.families.qwen import qwen_windows
from llaisys.models.families.variant import RopeLayout, Sizes, pattern, windows
from llaisys.models.loading.fields import Fields

_INTERVAL = 4  # of layers without RoPE in SmolLM3


def smollm3_layout(fields: Fields, sizes: Sizes) -> RopeLayout:
    """`no_rope_layers`: 1 for each layer with RoPE (sic), or `no_rope_layer_interval`."""
    flags, layers = fields.get("no_rope_layers"), sizes.layers
    if flags is None:
        step = fields.integer("no_rope_layer_interval", 0, 1 << 16, _INTERVAL) or _INTERVAL
        return RopeLayout(layers_without=tuple(range(step - 1, layers, step)))
    if not isinstance(flags, list) or len(flags) != layers:
        raise fields.fail("no_rope_layers", f"must be a list of {layers} numbers")
    return RopeLayout(layers_without=tuple(i for i, has_rope in enumerate(flags) if not has_rope))


LLAMA = DecoderFamily(
    name="llama",
    about="Llama and derived models (SmolLM2): no biases, or biases on q, k, v and o.",
    output_bias=True,
    experts=ExpertFamily(is_gguf_only=True),  # Mixtral
    is_permuted_in_gguf=True,
)
SMOLLM3 = DecoderFamily(
    name="smollm3",
    about="SmolLM3: every fourth layer has no RoPE.",
    output_bias=True,
    windows=qwen_windows,
    rope_layout=smollm3_layout,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 2e6},
    is_permuted_in_gguf=True,
    gguf_pre_tokenizer="smaug-bpe",
)
MISTRAL = DecoderFamily(
    name="mistral",
    about="Mistral 7B and derived models: no biases, one sliding window for all layers or none. "
    "Ministral has full attention in some layers.",
    attention_bias=False,
    windows=windows(4096),
    has_gguf_files=False,  # they have the architecture of Llama
)
MINISTRAL = replace(MISTRAL, name="ministral")
MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    about="Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files have the "
    'architecture "llama".',
    windows=windows(),
    experts=ExpertFamily(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    defaults={"num_experts_per_tok": 2},
)
CWM = DecoderFamily(
    name="cwm",
    about="Code World Model: Llama with windows in three of four layers.",
    attention_bias=False,
    windows=windows(8192, pattern(4, full=0)),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    has_gguf_files=False,
)
