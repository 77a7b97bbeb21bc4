"""moe_route and moe_mlp against NumPy: odd sizes, every weight format, batch invariance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from error_helpers import naming
from native_helpers import REALS, Array, Natives, array, bits, normal, op, rounded

from llaisys.libllaisys.handles import Stream, Tensor


@pytest.fixture(scope="module", params=[0, 2])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream | None]:
    if request.param == 0:
        yield None
        return
    with Stream(n_threads=request.param) as made:
        yield made


# -- Routing --------------------------------------------------------------------------------------


def route_reference(
    logits: Array,
    k: int,
    bias: Array | None,
    sigmoid: bool,
    renormalise: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Array, Array]:
    wide = logits.astype(np.float64)
    if sigmoid:
        scores = 1 / (1 + np.exp(-wide))
    else:
        powers = np.exp(wide - wide.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
    choice = scores + (0 if bias is None else bias.astype(np.float64))
    n, experts = logits.shape
    if top_groups < groups:
        grouped = choice.reshape(n, groups, experts // groups)
        ranked = np.sort(grouped, 2)[:, :, ::-1]
        best = ranked[:, :, :1] if bias is None else ranked[:, :, :2]
        order = np.argsort(-best.sum(2), 1, kind="stable")[:, :top_groups]
        kept = np.zeros((n, groups), bool)
        np.put_along_axis(kept, order, True, 1)
        choice = np.where(np.repeat(kept, experts // groups, 1), choice, -np.inf)
    ids = np.argsort(-choice, 1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, 1)
    if renormalise:
        weights = weights / weights.sum(1, keepdims=True)
    return ids, weights * scale


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "top_groups", "has_bias"),
    [(1, 1, 1, 1, False), (5, 2, 1, 1, False), (8, 3, 4, 2, False), (60, 4, 1, 1, True),
     (128, 8, 1, 1, False), (33, 33, 1, 1, True), (64, 6, 8, 3, True), (9, 2, 9, 4, True)],
)  # fmt: skip
def test_route(
    experts: int,
    k: int,
    groups: int,
    top_groups: int,
    has_bias: bool,
    sigmoid: bool,
    renormalise: bool,
    stream: Stream | None,
) -> None:
    for n in (0, 1, 7, 65):
        logits = normal(n, experts) * 2
        bias = normal(experts, seed=3) if has_bias else None
        with Natives() as native:
            ids, weights = native.empty((n, k), "i32"), native.empty((n, k), "f32")
            op("MoeRoute", ids, weights, native(logits, "f32"),
               None if bias is None else native(bias, "f32"), int(sigmoid), int(renormalise),
               groups, top_groups, 1.5, stream=stream)  # fmt: skip
            expected = route_reference(
                logits, k, bias, sigmoid, renormalise, groups, top_groups, 1.5
            )
            np.testing.assert_array_equal(array(ids), expected[0])
            np.testing.assert_allclose(array(weights), expected[1], rtol=2e-6)


def test_route_prefers_the_lowest_index_and_never_nan() -> None:
    logits = np.zeros((2, 6), np.float32)
    logits[1, [0, 3]] = np.nan
    with Natives() as native:
        ids, weights = native.empty((2, 3), "i32"), native.empty((2, 3), "f32")
        op("MoeRoute", ids, weights, native(logits, "f32"), None, 0, 1, 1, 1, 1.0)
        np.testing.assert_array_equal(array(ids), [[0, 1, 2], [1, 2, 4]])
        np.testing.assert_allclose(array(weights), np.full((2, 3), 1 / 3), rtol=1e-6)


@pytest.mark.parametrize("arguments", [(0, 1), (2, 1), (1, 0), (1, 2), (6, 1)])
def test_route_rejects(arguments: tuple[int, int]) -> None:
    with Natives() as native:
        ids, weights = native.empty((1, 3), "i32"), native.empty((1, 3), "f32")
        with naming(ValueError, "moe_route"):
            op("MoeRoute", ids, weights, native(normal(1, 7), "f32"), None, 0, 1, *arguments, 1.0)


# -- Experts --------------------------------------------------------------------------------------


def mlp_reference(
    x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array, biases: list[Array],
    limit: float = 0.0, alpha: float = 1.0,
) -> Array:  # fmt: skip
    out = np.zeros((len(x), down.shape[1]))
    for t, row in enumerate(x.astype(np.float64)):
        for j, e in enumerate(ids[t]):
            g = gate[e].astype(np.float64) @ row + (biases[0][e] if biases else 0)
            u = up[e].astype(np.float64) @ row + (biases[1][e] if biases else 0)
            if limit:
                g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
                h = (u + 1) * g / (1 + np.exp(-alpha * g))
            else:
                h = u * g / (1 + np.exp(-g))
            y = down[e].astype(np.float64) @ h + (biases[2][e] if biases else 0)
            out[t] += weights[t, j] * y
    return out


def experts_of(n: int, k: int, experts: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng([seed, n, k, experts])
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(n)]).reshape(n, k)
    return ids, rng.random((n, k), np.float32)


def run_mlp(
    native: Natives, x: Tensor, ids: Array, weights: Array, parts: list[Tensor], experts: int,
    hidden: int, biases: list[Array] | None = None, limit: float = 0.0, alpha: float = 1.0,
    stream: Stream | None = None,
) -> Tensor:  # fmt: skip
    out = native.empty((len(ids), hidden), "f32")
    extra: list[Tensor | None] = [None] * 3
    if biases:
        extra = [native(bias, "f32") for bias in biases]
    op("MoeMlp", out, x, native(ids, "i32"), native(weights, "f32"), *parts, *extra, experts,
       limit, alpha, stream=stream)  # fmt: skip
    return out


# (tokens, experts of a token, experts, hidden size, inner size)
SHAPES = ((1, 1, 1, 3, 5), (1, 2, 3, 7, 33), (5, 2, 4, 33, 31), (3, 8, 9, 64, 40),
          (70, 3, 5, 65, 34), (300, 2, 2, 16, 17))  # fmt: skip


@pytest.mark.parametrize("dtype", REALS)
def test_mlp(dtype: str, stream: Stream | None) -> None:
    for n, k, experts, hidden, inner in SHAPES:
        x = normal(n, hidden)
        ids, weights = experts_of(n, k, experts)
        w = [
            rounded(normal(experts, *shape, seed=i) / np.sqrt(shape[1]), dtype)
            for i, shape in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)])
        ]
        for biases in ([], [normal(experts, rows, seed=9) for rows in (inner, inner, hidden)]):
            for limit in (0.0, 1.5):
                with Natives() as native:
                    parts = [native(m.reshape(-1, m.shape[2]), dtype) for m in w]
                    out = run_mlp(native, native(x, "f32"), ids, weights, parts, experts, hidden,
                                  biases, limit, 1.7, stream)  # fmt: skip
                    expected = mlp_reference(x, ids, weights, *w, biases, limit, 1.7)
                    # Tiles round x and the hidden values to bf16.
                    room = 3e-2 if dtype == "bf16" else 1e-5
                    np.testing.assert_allclose(
                        array(out), expected, rtol=0, atol=room * np.abs(expected).max()
                    )


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1"])
def test_mlp_with_quantised_experts(dtype: str, stream: Stream | None) -> None:
    """Equal to each expert alone as a dense MLP of llaisysLinear, within rounding."""
    for n, k, experts, hidden, inner in ((1, 2, 3, 64, 32), (9, 2, 4, 32, 96), (40, 3, 5, 96, 64)):
        x = normal(n, hidden)
        ids, weights = experts_of(n, k, experts)
        with Natives() as native:
            parts = []
            for i, (rows, columns) in enumerate(
                [(inner, hidden), (inner, hidden), (hidden, inner)]
            ):
                plain = native(normal(experts * rows, columns, seed=i), "f32")
                parts.append(native.empty((experts * rows, columns), dtype))
                op("Quantise", parts[-1], plain)
            out = array(
                run_mlp(
                    native, native(x, "f32"), ids, weights, parts, experts, hidden, stream=stream
                )
            )
            expected = np.zeros_like(out)
            for t in range(n):
                for j, e in enumerate(ids[t]):
                    one = [
                        native.keep(p.slice(0, e * rows, (e + 1) * rows))
                        for p, rows in zip(parts, (inner, inner, hidden), strict=True)
                    ]
                    y = run_mlp(native, native(x[t : t + 1], "f32"), np.zeros((1, 1)),
                                np.ones((1, 1)), one, 1, hidden)  # fmt: skip
                    expected[t] += weights[t, j] * array(y)[0]
            np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_a_row_does_not_depend_on_the_batch(dtype: str, stream: Stream | None) -> None:
    n, k, experts, hidden, inner = 150, 2, 5, 64, 96
    x = normal(n, hidden)
    ids, weights = experts_of(n, k, experts)
    with Natives() as native:
        parts = []
        for i, (rows, columns) in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)]):
            values = normal(experts * rows, columns, seed=i)
            if dtype == "q8_0":
                parts.append(native.empty(values.shape, dtype))
                op("Quantise", parts[-1], native(values, "f32"))
            else:
                parts.append(native(values, dtype))
        together = run_mlp(native, native(x, "f32"), ids, weights, parts, experts, hidden,
                           stream=stream)  # fmt: skip
        for first, last in ((0, 1), (17, 18), (40, 60), (149, 150)):
            alone = run_mlp(native, native(x[first:last], "f32"), ids[first:last],
                            weights[first:last], parts, experts, hidden)  # fmt: skip
            assert bits(alone) == bits(native.keep(together.slice(0, first, last)))


def test_mlp_rejects_an_expert_out_of_range() -> None:
    with Natives() as native:
        parts = [native(normal(6, 4), "f32"), native(normal(6, 4), "f32"),
                 native(normal(8, 3), "f32")]  # fmt: skip
        with naming(ValueError, "experts"):
            run_mlp(native, native(normal(1, 4), "f32"), np.array([[2]]), np.ones((1, 1)), parts,
                    2, 4)  # fmt: skip
