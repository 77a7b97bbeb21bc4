"""`ModelConfig`: hyper-parameters of a decoder, independent of the file format."""

from dataclasses import dataclass

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.experts import Experts
from llaisys.models.families.latent import Latent
from llaisys.models.families.rope import RopeScaling
from llaisys.models.families.variant import RopeLayout, Variant
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.family import CheckpointConfig
from llaisys.models.loading.fields import MAX_PARAMETERS
from llaisys.models.loading.quantization import WeightScheme


@dataclass(frozen=True, slots=True)
class Encoder:
    """What an encoder has beyond a decoder."""

    token_types: int  # rows of the token type embedding; 0: none
    first_position: int = 0  # row of the position embedding of the first token
    has_score: bool = False  # a classifier of one label: the score of a pair of texts
    is_score_raw: bool = False  # the score is not passed through a sigmoid
    pooling: str = "cls"  # default of embeddings


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """Hyper-parameters of a decoder. All sizes are positive; num_kv_heads divides num_heads."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # even
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    longest_context: int  # upper limit of max_model_len; max_position_embeddings is its default
    tie_word_embeddings: bool
    attention_bias: bool  # q, k, v have a bias
    output_bias: bool  # o_proj has a bias
    qk_norm: bool  # RMS norm per head of q and k before RoPE
    sliding_window: int | None  # of the layers in window_layers; None: full attention everywhere
    window_layers: tuple[int, ...]
    bos_token_id: int | None
    quantization: WeightScheme | None = None  # of the matrices of a quantised directory
    variant: Variant = Variant()
    rope: RopeLayout = RopeLayout()
    experts: Experts | None = None  # None: every MLP is dense
    encoder: Encoder | None = None  # None: a decoder
    latent: Latent | None = None  # latent attention: num_kv_heads is 1

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope.rotary_dim or self.head_dim

    def q_norm_scale(self, layer: int) -> float:
        """Factor of the norm of q: the attention factor of RoPE, for queries and keys."""
        if not self.rope.scales_q_norm or self.rope_scaling is None:
            return 1.0
        has_window = self.layer_window(layer) is not None
        return 1.0 if has_window else self.rope_scaling.attention_factor**2

    def layer_window(self, layer: int) -> int | None:
        """The attention window of one layer in tokens; None: full attention."""
        return self.sliding_window if layer in self.window_layers else None

    def check(self, where: str) -> None:
        """Raise unless the sizes are consistent; `where` names the file."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{where}: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim {self.head_dim} is odd; RoPE needs even")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ModelLoadError(
                f"{where}: RoPE of {self.rotary_dim} values is not even or more than head_dim "
                f"{self.head_dim}"
            )
        per_layer = self.hidden_size * (
            2 * self.head_dim * (self.num_heads + self.num_kv_heads) + 3 * self.intermediate_size
        )
        if self.experts is not None:
            self.experts.check(where)
            per_layer += 3 * self.hidden_size * self.experts.inner * self.experts.count
        total = self.num_layers * per_layer + 2 * self.vocab_size * self.hidden_size
        if total > MAX_PARAMETERS:
            raise ModelLoadError(
                f"{where}: the sizes give {total} parameters, more than {MAX_PARAMETERS}"
            )


def decoder_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config of a decoder checkpoint; ModelLoadError for any other model."""
    config = checkpoint.config
    if not isinstance(config, ModelConfig):
        raise ModelLoadError(f"{checkpoint.where}: a {config.model_type} model is no decoder")
    return config
