"""StarCoder2: layer norms and linear layers with bias, an MLP without a gate."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.variant import Keys, Sizes, Variant
from llaisys.models.families.windows import every_layer, gguf_every_layer


def starcoder2_variant(keys: Keys, sizes: Sizes) -> Variant:
    has_bias = keys.boolean("use_bias", "", True)
    return Variant(norm="layer", norm_bias=True, mlp="gelu", mlp_bias=has_bias)


STARCODER2 = DecoderFamily(
    name="starcoder2",
    output_bias=True,
    windows=every_layer,
    gguf_windows=gguf_every_layer,
    variant=starcoder2_variant,
    names=TensorNames(hf={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    defaults={"tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True},
    bias_key="use_bias",
    epsilon_key="norm_epsilon",
    activations=("gelu_pytorch_tanh",),
    gguf_pre_tokenizer="starcoder",
)
