"""BERT, RoBERTa and XLM-RoBERTa against transformers: embeddings, scores of pairs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_models import (
    ENCODERS,
    POSITIONS,
    VOCAB,
    hidden_states,
    make_encoder,
    save_encoder,
    write_encoder_gguf,
)
from error_helpers import invalid_input, naming
from numpy.typing import NDArray
from reference_models import opened, random_tokens

from llaisys import LLM, SamplingParams
from llaisys.common.embedding import pooling_params
from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.common.step import ModelStepInput
from llaisys.entrypoints.cli import main
from llaisys.models.families import open_checkpoint

pytestmark = pytest.mark.parity
LENGTHS = (1, 2, 5, 16, 17, 40, POSITIONS, 33)
# No padding tokens, which move the positions of transformers.
PROMPTS = [[t + 4 for t in random_tokens(n, VOCAB - 4, seed=n)] for n in LENGTHS]
PAIRS = [("the cat", "a dog ran"), ("the cat", "mat"), ("the cat", "cats on the mat sat sat")]


def pooled(states: NDArray[np.float64], how: str) -> NDArray[np.float64]:
    vector = {"cls": states[0], "last": states[-1], "mean": states.mean(axis=0)}[how]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module", params=ENCODERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A transformers model and its directory."""
    model = make_encoder(request.param)
    return model, save_encoder(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("how", ["cls", "mean", "last"])
def test_embeddings_equal_transformers_alone_and_batched(pair: tuple[Any, Path], how: str) -> None:
    model, directory = pair
    expected = [pooled(hidden_states(model, prompt), how) for prompt in PROMPTS]
    # 100 tokens per step: several steps, and texts that wait for a step with room.
    with LLM(str(directory), max_num_batched_tokens=100, max_num_seqs=5) as llm:
        batched = [output.embedding for output in llm.embed(PROMPTS, pooling=how)]
        alone = [llm.embed(prompt, pooling=how)[0].embedding for prompt in PROMPTS]
    assert batched == alone
    for got, wanted in zip(batched, expected, strict=True):
        assert np.abs(np.array(got) - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("mode", "how"), [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")]
)
def test_pooling_is_that_of_the_sentence_transformers_files(
    mode: str, how: str, tmp_path: Path
) -> None:
    model = make_encoder("bert")
    with LLM(str(save_encoder(model, tmp_path, mode))) as llm:
        assert llm.model_info.pooling == how
        text = "the cats sat"
        ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
        (output,) = llm.embed(text)
        assert output.prompt_token_ids == ids
        expected = pooled(hidden_states(model, ids), how)
        np.testing.assert_allclose(output.embedding, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("is_raw", [False, True])
def test_scores_of_pairs_equal_transformers(name: str, is_raw: bool, tmp_path: Path) -> None:
    model = make_encoder(name, "ForSequenceClassification")
    save_encoder(model, tmp_path)
    if is_raw:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for first, second in PAIRS:
        inputs = dict(tokenizer(first, second, return_tensors="pt"))
        if name != "bert":
            inputs.pop("token_type_ids", None)  # it has one type
        with torch.no_grad():
            logit = model(**inputs).logits[0, 0]
        expected.append(float(logit if is_raw else torch.sigmoid(logit)))
    assert len(set(expected)) == len(expected)
    with LLM(str(tmp_path)) as llm:
        got = llm.score("the cat", [second for _, second in PAIRS])
        assert got == [llm.score(*pair)[0] for pair in PAIRS]
        np.testing.assert_allclose(got, expected, rtol=1e-4)
        with invalid_input("model"):
            llm.embed("the cat")


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_gguf_file_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, hidden_size=64, intermediate_size=96)
    path = tmp_path / "model.gguf"
    write_encoder_gguf(model, path)
    with LLM(str(path), dtype="f32") as llm:
        assert llm.model_info.is_encoder and llm.model_info.pooling == "mean"
        got = [output.embedding for output in llm.embed(PROMPTS)]
        for vector, prompt in zip(got, PROMPTS, strict=True):
            expected = pooled(hidden_states(model, prompt), "mean")
            np.testing.assert_allclose(vector, expected, atol=1e-5)
        words = "The cats sat on a ran"
        directory = save_encoder(make_encoder("bert"), tmp_path / "files")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert llm.tokenizer.encode(words) == tokenizer(words)["input_ids"]


def test_gguf_reranker_equals_transformers(tmp_path: Path) -> None:
    model = make_encoder(
        "roberta", "ForSequenceClassification", hidden_size=64, intermediate_size=96
    )
    path = tmp_path / "model.gguf"
    write_encoder_gguf(model, path)
    with LLM(str(path), dtype="f32") as llm:
        for first, second in PAIRS:
            texts = [llm.tokenizer.encode(text, False) for text in (first, second)]
            ids, _ = llm.tokenizer.join_pair(*texts)
            with torch.no_grad():
                logit = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits
            assert llm.score(first, second)[0] == pytest.approx(float(logit.sigmoid()), rel=1e-4)


def test_head_of_a_language_model_is_ignored(tmp_path: Path) -> None:
    """The tensors have a prefix then, and there is a matrix that is not used."""
    model = make_encoder("roberta", "ForMaskedLM")
    with LLM(str(save_encoder(model, tmp_path))) as llm:
        (output,) = llm.embed(PROMPTS[3])
    np.testing.assert_allclose(
        output.embedding, pooled(hidden_states(model, PROMPTS[3]), "cls"), atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_weights_and_two_ranks_are_near(dtype: str, tmp_path: Path) -> None:
    model = make_encoder("bert")
    save_encoder(model, tmp_path)
    expected = [pooled(hidden_states(model, prompt), "mean") for prompt in PROMPTS]
    with LLM(str(tmp_path), dtype=dtype, tensor_parallel_size=2, pooling="mean") as llm:
        for output, wanted in zip(llm.embed(PROMPTS), expected, strict=True):
            assert float(np.array(output.embedding) @ wanted) > 0.999


def test_generation_and_long_texts_are_refused(pair: tuple[Any, Path]) -> None:
    _, directory = pair
    with LLM(str(directory)) as llm:
        for params in (None, SamplingParams(max_tokens=0, prompt_logprobs=1)):
            with invalid_input("model"):
                llm.generate("the cat", params)
        with invalid_input("prompt"):
            llm.embed([5] * (POSITIONS + 1))
        assert len(llm.embed([5] * POSITIONS)[0].embedding) == 48
        with invalid_input("pooling"):
            llm.generate([5, 6], pooling_params("score"))


@pytest.mark.parametrize(
    "options", [{"context_shift": True}, {"enable_lora": True}], ids=lambda o: next(iter(o))
)
def test_options_of_generation_are_refused(pair: tuple[Any, Path], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        LLM(str(pair[1]), **options)


def test_budget_limits_the_length_of_a_text(pair: tuple[Any, Path]) -> None:
    with LLM(str(pair[1]), max_num_batched_tokens=50, max_num_seqs=2) as llm:
        assert llm.model_info.max_model_len == 50
        assert len(llm.embed([[5] * 50, [6] * 50, [7]])) == 3


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "relative": (
        {"position_embedding_type": "relative_key"},
        "position_embedding_type is 'relative_key'; only 'absolute'",
    ),
    "decoder": ({"is_decoder": True}, "is_decoder is true; it is not supported"),
    "relu": ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "labels": (
        {"architectures": ["BertForSequenceClassification"], "num_labels": 3, "id2label": None},
        "has 3 labels",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_unsupported_configs_are_refused(name: str, tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path)
    changes, message = CHANGES[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(tmp_path)


def test_unsupported_pooling_needs_the_option(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, "max_tokens")
    with naming(ModelLoadError, "pooling_mode_max_tokens"):
        LLM(str(tmp_path))
    with LLM(str(tmp_path), pooling="mean") as llm:
        assert llm.model_info.pooling == "mean"


def test_other_modules_are_refused(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, "cls_token")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with naming(ModelLoadError, "'Dense'"):
        LLM(str(tmp_path))


def test_check_model(pair: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", str(pair[1]), "--tokens", "13"]) == 0
    out = capsys.readouterr().out
    assert "last hidden states: finite" in out and "equal within the tolerance" in out
    assert "layer 2 in" in out and "last norm" in out


def step_of(tokens: list[int], positions: list[int], seqs: list[int], **rest: Any) -> Any:
    return ModelStepInput(
        np.array(tokens),
        np.array(positions),
        np.array(seqs),
        np.zeros(len(tokens), np.int8),
        **rest,
    )


def test_steps_have_whole_sequences(pair: tuple[Any, Path]) -> None:
    """Micro-batches end between sequences; parts of a sequence and logits are refused."""
    model, directory = pair
    options = {"kv_cache_layout": "slot", "kv_cache_capacity_tokens": 64, "max_batch_tokens": 5}
    with opened(directory, **options) as adapter:
        texts = [[5, 6, 7], [8, 9, 10, 11], [12], [13, 14, 15, 16, 17]]
        tokens = [token for text in texts for token in text]
        positions = [i for text in texts for i in range(len(text))]
        seqs = [seq for seq, text in enumerate(texts) for _ in text]
        adapter.forward(step_of(tokens, positions, seqs, pooling=np.ones(13, np.uint8)), None)
        for seq, text in enumerate(texts):
            expected = hidden_states(model, text)[-1]
            assert np.abs(adapter.pooled(seq) - expected).max() < 1e-4 * np.abs(expected).max()
        for tokens, positions, message in (
            ([5, 6], [1, 2], "must be 0"),
            ([5, 6], [0, 2], "must be 1"),
            ([5] * 6, list(range(6)), "at most 5 tokens"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                adapter.forward(step_of(tokens, positions, [9] * len(tokens)), None)
        step = step_of([5], [0], [9])
        step.logits_mask[:] = 1
        with pytest.raises(InvalidInputError):
            adapter.forward(step, None)
        adapter.num_token_types = 2  # passes the types on
        step = step_of([5], [0], [9], token_types=np.array([9], np.uint8))
        with naming(InvalidInputError, "token_types[0]"):
            adapter.forward(step, None)
