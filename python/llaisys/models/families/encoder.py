"""BERT, RoBERTa and XLM-RoBERTa encoders (bge, e5, gte and others) for embeddings, and their
classifiers of one label, which score pairs of texts (rerankers)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TYPES, TensorNames
from llaisys.models.families.model_config import Encoder, ModelConfig
from llaisys.models.families.variant import RopeLayout, Sizes, Variant
from llaisys.models.loading.family import GgufContents
from llaisys.models.loading.fields import MAX_POSITIONS, MAX_VOCAB, Fields
from llaisys.models.loading.shard import TensorSource

_CLASSIFIER = "ForSequenceClassification"
# Our name within a layer -> that of the files.
_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "self_attn.post_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp.post_norm": "output.LayerNorm",
}
_GLOBAL = {
    "model.embed_tokens": "embeddings.word_embeddings",
    "model.embed_positions": "embeddings.position_embeddings",
    "model.embed_types": "embeddings.token_type_embeddings",
    "model.embed_norm": "embeddings.LayerNorm",
}
# GGUF names: within a layer, and of the classifier.
_GGUF_LAYER = {"attn_output_norm": "self_attn.post_norm", "layer_output_norm": "mlp.post_norm"}
_GGUF_SCORE = {"cls": "score.dense", "cls.output": "score.output"}
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # pooling_type
_OLD_NORMS = {"weight": "gamma", "bias": "beta"}  # of LayerNorm in old files
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def encoder_variant(fields: Fields, sizes: Sizes) -> Variant:
    is_tanh = fields.string("hidden_act", "gelu") in _TANH
    return Variant(
        norm="layer",
        norm_position="residual",
        norm_bias=True,
        mlp="gelu" if is_tanh else "gelu_erf",
        mlp_bias=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily(DecoderFamily):
    """An encoder with learned positions. The fields are the differences between families."""

    has_padding_positions: bool = False  # the positions of a text begin at pad_token_id + 1
    prefix: str  # of tensors in models with a head
    # Head of classifiers: its layers in the files, applied to the first token with tanh between.
    dense: str
    output: str

    def config_from_json(self, fields: Fields, generation: Fields) -> ModelConfig:
        positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        first = 0
        if self.has_padding_positions:
            first = fields.integer("pad_token_id", 0, MAX_VOCAB, 1) + 1
        if positions <= first:
            raise fields.fail("max_position_embeddings", f"is {positions}, not above {first}")
        own = {"max_position_embeddings": positions - first, "tie_word_embeddings": True}
        config = DecoderFamily.config_from_json(
            self, Fields({**fields.values, **own}, fields.where), generation
        )
        encoder = Encoder(
            token_types=fields.integer("type_vocab_size", 0, 256, 2),
            first_position=first,
            has_score=_is_reranker(fields),
            is_score_raw=_has_raw_scores(fields),
        )
        return replace(config, encoder=encoder, eos_token_ids=())

    def config_from_gguf(self, contents: GgufContents) -> ModelConfig:
        """GGUF files have the positions of texts only, and no activation of the scores."""
        config = DecoderFamily.config_from_gguf(self, contents)
        types = contents.tensors.get(TYPES)
        pooling = contents.metadata.integer(f"{self.architecture()}.pooling_type", 0, 8, 2)
        encoder = Encoder(
            token_types=0 if types is None else types.shape[0],
            has_score="score.output.weight" in contents.tensors,
            pooling=_GGUF_POOLINGS.get(pooling, "cls"),
        )
        return replace(config, encoder=encoder, eos_token_ids=())

    def name_from_gguf(self, name: str) -> str | None:
        module, _, kind = name.rpartition(".")
        if module in _GGUF_SCORE:
            return f"{_GGUF_SCORE[module]}.{kind}"
        return DecoderFamily.name_from_gguf(self, name)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from DecoderFamily.tensors(self, config)
        if config.encoder is not None and config.encoder.has_score:
            yield "score.dense.weight", (config.hidden_size, config.hidden_size)
            yield "score.dense.bias", (config.hidden_size,)
            yield "score.output.weight", (1, config.hidden_size)
            yield "score.output.bias", (1,)

    def source(self, name: str, config: ModelConfig, is_gguf: bool) -> TensorSource:
        if is_gguf:
            return TensorSource(name)
        module, kind = name.rsplit(".", 1)
        rows = None
        if module.startswith("score."):
            own = self.dense if module == "score.dense" else self.output
            return TensorSource(f"{own}.{kind}")
        if module == "model.embed_positions" and config.encoder is not None:
            first = config.encoder.first_position
            rows = (first, first + config.max_position_embeddings) if first else None
        if module in _GLOBAL:
            own = _GLOBAL[module]
        else:
            _, _, layer, rest = module.split(".", 3)
            own = f"encoder.layer.{layer}.{_LAYER[rest]}"
        names = [f"{own}.{kind}", f"{self.prefix}{own}.{kind}"]
        if own.endswith("LayerNorm"):
            names += [f"{self.prefix}{own}.{_OLD_NORMS[kind]}", f"{own}.{_OLD_NORMS[kind]}"]
        source = None
        for found in reversed(names):
            source = TensorSource(found, rows, otherwise=source)
        assert source is not None
        return source


def _is_reranker(fields: Fields) -> bool:
    """Whether the model is a classifier; ModelLoadError unless it has one label."""
    names = fields.values.get("architectures")
    names = names if isinstance(names, list) else []
    if not any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in names):
        return False
    labels = fields.values.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else fields.integer("num_labels", 1, 1000, 2)
    if count != 1:
        why = f"has {count} labels; classifiers need 1, the score of a pair of texts"
        raise fields.fail("id2label", why)
    return True


def _has_raw_scores(fields: Fields) -> bool:
    """Whether a score is the output of the classifier, without sigmoid: the activation of
    sentence-transformers."""
    section = fields.section("sentence_transformers")
    name = section.string("activation_fn", None)
    name = name or fields.string("sbert_ce_default_activation_function", None) or ""
    return str(name).endswith("Identity")


BERT = EncoderFamily(
    name="bert",
    about="BERT, RoBERTa and XLM-RoBERTa encoders (bge, e5, gte and others) for embeddings, and "
    "their classifiers of one label, which score pairs of texts (rerankers).",
    attention_bias=True,
    output_bias=True,
    variant=encoder_variant,
    rope_layout=lambda _, sizes: RopeLayout(layers_without=tuple(range(sizes.layers))),
    defaults={"layer_norm_eps": 1e-12, "rope_theta": 10000.0},
    unsupported=("is_decoder",),
    choices={"position_embedding_type": ("absolute",)},
    epsilon_key="layer_norm_eps",
    activations=("gelu", *_TANH),
    names=TensorNames(gguf=_GGUF_LAYER),
    prefix="bert.",
    dense="bert.pooler.dense",
    output="classifier",
)
ROBERTA = replace(
    BERT,
    name="roberta",
    has_gguf_files=False,  # they have the architecture of BERT
    has_padding_positions=True,
    prefix="roberta.",
    dense="classifier.dense",
    output="classifier.out_proj",
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta")
