"""Weight slots of a model handle: ownership and errors.

A decoder (qwen2, llama) has slots per layer and tied embeddings; the mock model has one slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import (
    REALS,
    MockModel,
    Shape,
    create_params,
    is_sanitized,
    resident_bytes,
    tensor,
)

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.libllaisys.handles import Tensor
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import LlaisysDecoderWeights

SHAPE = Shape(voc=11, nh=2, nkvh=1, dh=4, maxseq=32)
N_LAYERS = 2
DI = 6


def decoder_shapes() -> dict[str, tuple[int, ...]]:
    hs, kv = SHAPE.hs, SHAPE.nkvh * SHAPE.dh
    return {
        "in_embed": (SHAPE.voc, hs), "out_embed": (SHAPE.voc, hs), "out_norm_w": (hs,),
        "attn_norm_w": (hs,), "attn_q_w": (hs, hs), "attn_k_w": (kv, hs), "attn_v_w": (kv, hs),
        "attn_o_w": (hs, hs), "mlp_norm_w": (hs,), "mlp_gate_w": (DI, hs), "mlp_up_w": (DI, hs),
        "mlp_down_w": (hs, DI), "attn_q_b": (hs,), "attn_k_b": (kv,), "attn_v_b": (kv,),
        "attn_o_b": (hs,), "attn_q_norm_w": (SHAPE.dh,), "attn_k_norm_w": (SHAPE.dh,),
    }  # fmt: skip


GLOBAL = ("in_embed", "out_embed", "out_norm_w")
OPTIONAL = (
    *("attn_q_b", "attn_k_b", "attn_v_b", "attn_o_b", "attn_q_norm_w", "attn_k_norm_w"),
    *("attn_post_norm_w", "mlp_post_norm_w", "attn_norm_b", "mlp_norm_b", "mlp_up_b", "mlp_down_b"),
    *("attn_post_norm_b", "mlp_post_norm_b", "attn_sinks_w"),
)
# Of encoders and of latent attention.
UNUSED = (
    *("out_norm_b", "pos_embed", "type_embed", "embed_norm_w", "embed_norm_b"),
    *("attn_q_a_w", "attn_q_a_norm_w", "attn_kv_a_w", "attn_kv_a_norm_w", "attn_k_b_w"),
    "attn_v_b_w",
)


class Decoder(MockModel):
    def __init__(self, model_type: str = "qwen2", **fields: int) -> None:
        self.shape = SHAPE
        meta = SHAPE.meta(nlayer=N_LAYERS, di=DI)
        Model.__init__(self, create_params(meta, model_type, **fields))

    def put(self, field: str, layer: int = 0, seed: int = 0, dtype: str = "f32") -> None:
        shape = decoder_shapes()[field]
        values = np.random.default_rng([seed, layer]).standard_normal(shape, np.float32) * 0.3
        made = tensor(values, dtype)
        self.replace_weight(field, layer, made)

    def fill(self, leave_out: tuple[str, int] | None = None, seed: int = 0) -> None:
        for field in decoder_shapes():
            for layer in range(1 if field in GLOBAL else N_LAYERS):
                if field not in OPTIONAL and (field, layer) != leave_out:
                    self.put(field, layer, seed)


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder() as made:
        yield made


def test_decoder_runs_without_optional_weights(decoder: Decoder) -> None:
    decoder.fill()
    before = decoder.run([1, 2, 3])
    assert np.isfinite(before).all()
    decoder.put("attn_q_b", 1, seed=5)
    after = decoder.run([1, 2, 3], seqs=[[1]] * 3)
    assert after.tobytes() != before.tobytes()


@pytest.mark.parametrize("missing", [("in_embed", 0), ("out_norm_w", 0), ("mlp_up_w", 1)])
def test_step_names_a_missing_weight(decoder: Decoder, missing: tuple[str, int]) -> None:
    decoder.fill(leave_out=missing)
    assert decoder.try_step([1]) == -1
    text = lib().llaisysLastError().decode()
    assert f"weight {missing[0]}" in text and "missing" in text
    assert missing[0] in GLOBAL or f"layer {missing[1]}" in text
    assert decoder.kv_stats().used_slots == 0
    decoder.put(*missing)
    assert decoder.try_step([1]) == 0


def test_mock_model_without_weights_is_rejected() -> None:
    with MockModel(weights=False) as model:
        assert model.try_step([1]) == -1
        assert "weight in_embed is missing" in lib().llaisysLastError().decode()


def test_replaced_weight_is_used_by_the_next_step(decoder: Decoder) -> None:
    decoder.fill()
    first = decoder.run([1, 2, 3])
    decoder.fill(seed=1)
    second = decoder.run([1, 2, 3], seqs=[[1]] * 3)
    decoder.fill(seed=0)
    third = decoder.run([1, 2, 3], seqs=[[2]] * 3)
    assert first.tobytes() == third.tobytes() != second.tobytes()


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_tied_embedding_is_freed_once(model_type: str) -> None:
    """ASan or glibc aborts on a double free; the values show that both slots are used."""
    for close_before_step in (False, True):
        with Decoder(model_type) as decoder:
            decoder.fill()
            table = tensor(np.eye(SHAPE.voc, SHAPE.hs, dtype=np.float32), "f32")
            decoder.replace_weight("in_embed", 0, table, ("out_embed", 0))
            if not close_before_step:
                decoder.run([1, 2])
                decoder.put("out_embed", seed=3)  # in_embed keeps the tied tensor
                decoder.run([1, 2], seqs=[[1]] * 2)
                decoder.put("in_embed", seed=3)
                decoder.run([1, 2], seqs=[[2]] * 2)


def test_slot_accepts_its_own_handle_again(decoder: Decoder) -> None:
    table = tensor(np.ones((SHAPE.voc, SHAPE.hs), np.float32), "f32")
    decoder.replace_weight("in_embed", 0, table, ("in_embed", 0))
    decoder.fill(leave_out=("in_embed", 0))
    assert decoder.try_step([1]) == 0


@pytest.mark.skipif(is_sanitized(), reason="ASan keeps freed memory for a while")
@pytest.mark.parametrize("with_steps", [False, True])
def test_replacing_a_slot_does_not_leak(with_steps: bool) -> None:
    """64 tensors of 4 MB through one slot: resident memory may grow by a few of them at most."""
    shape = Shape(voc=16384, nh=8, nkvh=1, dh=8)
    values = np.ones((shape.voc, shape.hs), np.float32)
    with MockModel(shape, weights=False, kv_cache_capacity_tokens=1024) as model:
        sizes = []
        for _ in range(64):
            made = tensor(values, "f32")
            model.replace_weight("in_embed", 0, made)
            if with_steps:
                assert model.try_step([1]) == 0
                model.kv_seq_rm(0, -1, -1)
            sizes.append(resident_bytes())
    assert max(sizes[8:]) - sizes[7] < 5 * values.nbytes


@pytest.mark.skipif(is_sanitized(), reason="ASan keeps freed memory for a while")
def test_create_and_destroy_do_not_leak() -> None:
    shape = Shape(voc=16384, nh=8, nkvh=1, dh=8, maxseq=4096)
    sizes = []
    for i in range(24):
        with MockModel(shape) as model:
            model.run([1] * 100, marks=[1] * 100)
            assert model.kv_seq_cp(i, 0, -1, -1) == 0
        sizes.append(resident_bytes())
    assert max(sizes[8:]) - sizes[7] < 16 << 20


@pytest.mark.parametrize(
    ("field", "layer", "shape", "dtype", "words"),
    [
        ("nonsense", 0, (8, 8), "f32", "one of in_embed.*got 'nonsense'"),
        ("", 0, (8, 8), "f32", "got ''"),
        ("attn_q_w", -1, (8, 8), "f32", "layer must be in \\[0, 2\\), got -1"),
        ("attn_q_w", 2, (8, 8), "f32", "layer must be in \\[0, 2\\), got 2"),
        ("attn_q_w", 2147483647, (8, 8), "f32", "layer must be in"),
        ("attn_q_w", 1, (8, 7), "f32", "attn_q_w of layer 1: shape must be \\[8, 8\\], got"),
        ("attn_q_w", 1, (64,), "f32", "shape must be"),
        ("attn_q_w", 0, (8, 8), "i8", "dtype must be f32, f16, bf16 or a quantised one, got i8"),
        ("in_embed", 0, (11, 9), "f32", "weight in_embed: shape must be \\[11, 8\\]"),
        ("attn_k_b", 0, (8,), "f32", "shape must be \\[4\\]"),
    ],
)
def test_caller_keeps_a_rejected_tensor(
    decoder: Decoder, field: str, layer: int, shape: tuple[int, ...], dtype: str, words: str
) -> None:
    with Tensor.create(shape, dtype) as made:
        with pytest.raises(InvalidInputError, match=words):
            decoder.replace_weight(field, layer, made)
        assert made.shape == shape  # still owned by the test


def test_strided_tensor_and_null_are_rejected(decoder: Decoder) -> None:
    with (
        Tensor.create((8, 9), "f32") as wide,
        wide.slice(1, 0, 8) as view,
        pytest.raises(InvalidInputError),
    ):
        decoder.replace_weight("attn_q_w", 0, view)
    replace = lib().llaisysModelReplaceWeight
    assert replace(decoder.handle, b"attn_q_w", 0, None) == -1
    assert b"tensor is NULL" in lib().llaisysLastError()
    assert replace(decoder.handle, None, 0, None) == -1
    assert b"field is NULL" in lib().llaisysLastError()
    assert replace(None, b"attn_q_w", 0, None) == -1


def test_tensor_of_another_model_is_rejected(decoder: Decoder) -> None:
    """A norm keeps its values, packing releases those of an embedding: both have one owner."""
    replace = lib().llaisysModelReplaceWeight
    for field, shape in ("out_norm_w", (SHAPE.hs,)), ("out_embed", (SHAPE.voc, SHAPE.hs)):
        with Decoder() as other:
            made = tensor(np.ones(shape, np.float32), "f32")
            handle = made.handle
            other.replace_weight(field, 0, made)
            assert replace(decoder.handle, field.encode(), 0, handle) == -1
            text = lib().llaisysLastError().decode()
            assert text == f"weight {field}: the tensor belongs to another model"
            assert replace(other.handle, field.encode(), 0, handle) == 0  # its own tensor is valid
        assert not getattr(slots_of(decoder), field)


@pytest.mark.parametrize("with_step", [False, True])
def test_tensor_owned_by_a_model_cannot_be_destroyed(with_step: bool) -> None:
    """Replaced, tied, or written into a slot and adopted by a step: the model frees it."""
    destroy, replace = lib().llaisysTensorDestroy, lib().llaisysModelReplaceWeight
    with Decoder() as decoder:
        decoder.fill()
        slots = slots_of(decoder)
        assert replace(decoder.handle, b"out_embed", 0, slots.in_embed) == 0
        if with_step:
            slots.out_norm_w, left = direct_norm(), slots.out_norm_w
            assert decoder.try_step([1]) == 0
            assert destroy(left) == 0  # removed from its slot: the writer frees it
        layers = (ctypes.c_void_p * N_LAYERS).from_address(slots.attn_q_w)
        for handle in {*layers, *(getattr(slots, field) for field in GLOBAL)}:
            assert destroy(handle) == -1
            assert lib().llaisysLastError() == b"tensor belongs to a model, which destroys it"
        assert decoder.try_step([2]) == 0  # all weights are valid
        rejected = Tensor(slots.out_norm_w)
        with pytest.raises(InvalidInputError):
            rejected.close()
        rejected.close()  # a second close has no effect


def direct_norm() -> int:
    made = tensor(np.ones(SHAPE.hs, np.float32), "f32")
    handle = made.handle
    made.release_ownership()
    return handle


def test_tensor_of_another_model_written_into_a_slot_is_rejected_and_not_freed() -> None:
    with MockModel() as owner, MockModel(weights=False) as thief:
        slots_of(thief).in_embed = slots_of(owner).in_embed
        assert thief.try_step([1]) == -1
        assert b"weight in_embed: the tensor belongs to another model" in lib().llaisysLastError()
        thief.replace_weight("in_embed", 0, tensor(thief.shape.table(), "f32"))
        assert thief.try_step([1]) == owner.try_step([1]) == 0
        slots_of(thief).in_embed, own = slots_of(owner).in_embed, slots_of(thief).in_embed
        thief.close()  # frees no tensor of the owner
        lib().llaisysTensorDestroy(own)
        assert owner.try_step([2]) == 0


def test_tensor_removed_from_its_slot_may_move_to_another_model(decoder: Decoder) -> None:
    with Decoder() as other:
        decoder.fill()
        assert decoder.try_step([1]) == 0
        slots = slots_of(decoder)
        left = slots.out_norm_w
        made = tensor(np.ones(SHAPE.hs, np.float32), "f32")
        slots.out_norm_w = made.handle
        made.release_ownership()
        assert lib().llaisysModelReplaceWeight(other.handle, b"out_norm_w", 0, left) == 0
        assert decoder.try_step([1]) == 0


def test_layer_of_a_global_slot_is_ignored(decoder: Decoder) -> None:
    decoder.put("out_norm_w", layer=99)


@pytest.mark.parametrize("dtype", REALS)
def test_weights_in_every_dtype(decoder: Decoder, dtype: str) -> None:
    decoder.fill()
    for field in ("in_embed", "attn_q_w", "mlp_down_w", "mlp_norm_w"):
        decoder.put(field, 0, dtype=dtype)
    assert np.isfinite(decoder.run([1, 2])).all()


def test_mapped_weights_are_used_in_place_and_outlive_the_file(tmp_path: Path) -> None:
    shape = Shape()
    path = tmp_path / "table.bin"
    path.write_bytes(b"12345678" + shape.table().tobytes())
    with MockModel(weights=False) as model:
        mapped = Tensor.map(str(path), 8, (shape.voc, shape.hs), "f32")
        model.replace_weight("in_embed", 0, mapped)
        path.unlink()
        got = model.run([1, 2, 3])
    np.testing.assert_allclose(got, shape.sequence_logits([1, 2, 3])[2:], atol=2e-4)


# -- The slot table, written directly -------------------------------------------------------------


def slots_of(model: Model) -> LlaisysDecoderWeights:
    return LlaisysDecoderWeights.from_address(lib().llaisysModelWeights(model.handle))


def test_slot_written_directly_is_adopted_by_the_next_step() -> None:
    with MockModel(weights=False) as model:
        shape = model.shape
        slots = slots_of(model)
        assert slots.in_embed is None
        made = tensor(shape.table(), "f32")
        slots.in_embed = made.handle
        got = model.run([1, 2, 3])
        made.release_ownership()  # the model frees it
        np.testing.assert_allclose(got, shape.sequence_logits([1, 2, 3])[2:], atol=2e-4)


def test_step_rejects_an_invalid_tensor_written_directly() -> None:
    with MockModel(weights=False) as model:
        slots = slots_of(model)
        with Tensor.create((3, 3), "f32") as wrong:
            slots.in_embed = wrong.handle
            assert model.try_step([1]) == -1
            assert b"weight in_embed: shape must be" in lib().llaisysLastError()
            slots.in_embed = None
        assert model.try_step([1]) == -1
        assert b"missing" in lib().llaisysLastError()


def test_per_layer_slots_are_arrays_of_layers(decoder: Decoder) -> None:
    decoder.fill()
    slots = slots_of(decoder)
    for field, _ in LlaisysDecoderWeights._fields_:
        if field in GLOBAL:
            assert getattr(slots, field)
        elif field in UNUSED or field.startswith(("moe_", "shared_")):  # no experts
            assert getattr(slots, field) is None, field
        else:
            handles = (ctypes.c_void_p * N_LAYERS).from_address(getattr(slots, field))
            assert all(handles) != (field in OPTIONAL)


def test_use_after_close() -> None:
    model = MockModel()
    model.close()
    model.close()
    with Tensor.create((1,), "f32") as made, naming(ClosedError, "MockModel"):
        model.replace_weight("in_embed", 0, made)
    for use in (
        lambda: model.try_step([1]), lambda: model.n_outputs, lambda: model.params,
        lambda: model.kv_stats(), lambda: model.kv_dump(), lambda: model.kv_seq_keep(0),
        lambda: model.kv_seq_pos_max(0), lambda: model.sample_rows(0),
        lambda: model.sampler_forget(0), lambda: model.logits_address,
        lambda: model.kv_copy_slots(0, 0, 0),
    ):  # fmt: skip
        with pytest.raises(ClosedError):
            use()
