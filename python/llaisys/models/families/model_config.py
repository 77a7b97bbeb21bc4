"""`ModelConfig`: the hyper-parameters of a decoder, whatever file format they came from."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.rope import RopeScaling
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.family import CheckpointConfig
from llaisys.models.loading.limits import MAX_PARAMETERS
from llaisys.models.loading.quantization import WeightScheme


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """Of a decoder; every size is positive and the heads divide."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    longest_context: int  # that may be asked for; max_position_embeddings is what is taken unasked
    tie_word_embeddings: bool
    attention_bias: bool  # q, k, v have a bias
    output_bias: bool  # o_proj has one too
    qk_norm: bool  # each head of q and k is normed before it is rotated
    # The window of the layers listed in window_layers (all of them or a part); None: no layer.
    sliding_window: int | None
    window_layers: tuple[int, ...]
    bos_token_id: int | None
    quantization: WeightScheme | None = None  # of the matrices of a directory

    def layer_window(self, layer: int) -> int | None:
        """The attention window of one layer in tokens; None: full attention."""
        return self.sliding_window if layer in self.window_layers else None

    def check(self, where: str) -> None:
        """Raise unless the sizes fit together; `where` names the file."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{where}: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim {self.head_dim} is odd; RoPE needs even")
        per_layer = self.hidden_size * (
            2 * self.head_dim * (self.num_heads + self.num_kv_heads) + 3 * self.intermediate_size
        )
        total = self.num_layers * per_layer + 2 * self.vocab_size * self.hidden_size
        if total > MAX_PARAMETERS:
            raise ModelLoadError(
                f"{where}: the sizes ask for {total} parameters, more than {MAX_PARAMETERS}"
            )


def decoder_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config of a checkpoint that must be a decoder's."""
    config = checkpoint.config
    if not isinstance(config, ModelConfig):
        raise ModelLoadError(f"{checkpoint.where}: a {config.model_type} model is no decoder")
    return config
