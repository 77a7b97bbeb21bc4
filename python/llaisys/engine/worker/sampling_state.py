"""Sampling parameters by row of the input batch, and the sampler's arrays built from them.

Parameters of every row are arrays and are gathered. Rare ones (bias, bans, masks, a custom chain,
penalties) are in dictionaries: only their rows cost Python time.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.sampling import BAN, DEFAULT_SAMPLERS, FIELDS, MIROSTAT_SAMPLERS, SamplerKind
from llaisys.common.step import ROW_NUMBERS, SamplingMetadata, TokenMasks
from llaisys.common.types import NewSequence
from llaisys.engine.worker.token_rules import (
    START,
    DryPenalty,
    ThinkingBudget,
    WordAutomaton,
    automaton_of,
)

Array = NDArray[Any]

# Field of SamplingParams -> the sampler's array.
_ARRAYS = {name: about.array for name, about in FIELDS.items() if about.array is not None}
_KINDS = {kind.name.lower(): kind for kind in SamplerKind}


@dataclass(slots=True)
class _Bans:
    """Banned tokens of a row that depend on the tokens so far. Positions are those of the row; a
    context shift changes them."""

    first: int  # position of the first sampled token; words are matched from there on
    until: int  # position before which `stops` are banned (min_tokens)
    stops: tuple[int, ...]
    words: WordAutomaton | None  # words of two or more tokens
    position: int  # `state` is that after the tokens [first, position)
    state: int = START
    before: int = START  # the state at `first`

    def at(self, position: int, tokens: Array) -> tuple[int, ...]:
        """Return the banned tokens at `position`; `tokens`: the tokens before it."""
        stops = self.stops if position < self.until else ()
        if self.words is None:
            return stops
        self._read(position, tokens)
        return stops + self.words.banned(self.state)

    def shift(self, length: int, num_discard: int, tokens: Array) -> None:
        """Prepare for a context shift: `num_discard` of `length` tokens are discarded."""
        if self.words is not None:
            self._read(length, tokens)
        self.first = self.position = length - num_discard
        self.until -= num_discard
        self.before = self.state

    def _read(self, position: int, tokens: Array) -> None:
        assert self.words is not None
        if position < self.position:  # tokens were rolled back
            self.position, self.state = self.first, self.before
        for token in tokens[self.position : position].tolist():
            self.state = self.words.step(self.state, token)
        self.position = position


@dataclass(frozen=True, slots=True)
class _Mirostat:
    """Mirostat of a row; its state is the number `mirostat_mu`. A preempted sequence starts again
    with twice the target."""

    tau: float
    eta: float
    hides_logprobs: bool  # the request has no logprobs


_NO_MASK = (-1, 0)


class SamplingState:
    """Sampling parameters by row of `InputBatch`."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._numbers = {
            name: np.full(max_rows, neutral, dtype=np.float64)
            for name, neutral in ROW_NUMBERS.items()
        }
        # Rows with a non-neutral value: unused parameters cost nothing.
        self._users: dict[str, set[int]] = {name: set() for name in ROW_NUMBERS}
        self.seeds = np.zeros(max_rows, dtype=np.uint64)
        self.choices = np.zeros(max_rows, dtype=np.int32)
        # Rows with penalties, whose history the sampler stores: repeat_last_n, prompt tokens.
        self.penalised: dict[int, tuple[int, int]] = {}
        self._bias: dict[int, tuple[Array, Array]] = {}
        self._bans: dict[int, _Bans] = {}
        self._chains: dict[int, Array] = {}
        self._masks: dict[int, Array] = {}
        self._thinking: dict[int, ThinkingBudget] = {}
        self._dry: dict[int, DryPenalty] = {}
        self._mirostat: dict[int, _Mirostat] = {}
        self._logprob_ids: dict[int, Array] = {}  # logprob_token_ids
        # Masks of this step, and (next mask, masks after it) of each constrained row.
        self._step_masks: Array = np.zeros((0, (vocab_size + 31) // 32), dtype=np.uint32)
        self._next_mask: dict[int, tuple[int, int]] = {}
        self._default_chain = self._chain(DEFAULT_SAMPLERS)

    @staticmethod
    def _chain(names: tuple[str, ...] | list[str]) -> Array:
        return np.array([_KINDS[name] for name in names], dtype=np.uint8)

    def add(self, row: int, seq: NewSequence) -> None:
        params = seq.sampling
        for name, array in _ARRAYS.items():
            value = getattr(params, name)
            if value is not None:
                self._set_number(array, row, value)
        self.seeds[row] = seq.seed
        self.choices[row] = seq.choice
        if params.uses_penalties:
            self.penalised[row] = (params.repeat_last_n, seq.num_prompt_tokens)
        if params.dry_multiplier:
            self._dry[row] = DryPenalty(seq, self.vocab_size)
        if params.mirostat:
            self._chains[row] = self._chain(MIROSTAT_SAMPLERS)
            self._mirostat[row] = _Mirostat(
                params.mirostat_tau, params.mirostat_eta, params.logprobs is None
            )
            self._set_number("mirostat_mu", row, 2 * params.mirostat_tau)
            self._set_number("n_logprobs", row, params.logprobs or 0)
            self._set_number("post_sampling_probs", row, 1)
        elif params.samplers is not None and tuple(params.samplers) != DEFAULT_SAMPLERS:
            self._chains[row] = self._chain(tuple(params.samplers))
        if params.allowed_token_ids is not None:
            self._masks[row] = allowed_mask(params.allowed_token_ids, self.vocab_size)
        if params.logprob_token_ids is not None:
            self._logprob_ids[row] = np.array(params.logprob_token_ids, dtype=np.int64)
        bias = dict(params.bias_items)
        bias.update({word[0]: BAN for word in seq.bad_words if len(word) == 1})
        if bias:
            self._bias[row] = (
                np.array(list(bias), dtype=np.int32),
                np.array(list(bias.values()), dtype=np.float32),
            )
        words = tuple(word for word in seq.bad_words if len(word) > 1)
        if words or params.min_tokens:
            first = seq.num_prompt_tokens
            until = first + params.min_tokens
            stops = tuple(sorted(seq.stop_token_ids))
            automaton = automaton_of(words) if words else None
            self._bans[row] = _Bans(first, until, stops, automaton, first)

        if seq.thinking:
            self._thinking[row] = ThinkingBudget(seq)

    def _set_number(self, name: str, row: int, value: float) -> None:
        if value != ROW_NUMBERS[name]:
            self._numbers[name][row] = value
            self._users[name].add(row)

    def history(self, row: int, tokens: Array) -> tuple[list[int], list[int]]:
        """Return the prompt and output tokens of a penalised row that penalties cover."""
        window, first = self.penalised[row]
        start = 0 if window < 0 else max(0, len(tokens) - window)
        first = max(start, first)
        return tokens[start:first].tolist(), tokens[first:].tolist()

    def observe(self, row: int, logprob: float) -> bool:
        """Update Mirostat with the logprob of a sampled token. Returns whether the request has
        logprobs."""
        found = self._mirostat.get(row)
        if found is None:
            return True
        surprise = -logprob / math.log(2)
        self._users["mirostat_mu"].add(row)
        self._numbers["mirostat_mu"][row] -= found.eta * (surprise - found.tau)
        return not found.hides_logprobs

    def shift(self, row: int, length: int, num_discard: int, tokens: Array) -> None:
        """Prepare a row for a context shift: `num_discard` of `length` tokens are discarded."""
        for table in (self._bans, self._thinking):
            if row in table:
                table[row].shift(length, num_discard, tokens)
        if row in self.penalised:
            window, first = self.penalised[row]
            self.penalised[row] = (window, max(0, first - num_discard))

    def release(self, row: int) -> None:
        for name, users in self._users.items():
            if row in users:
                users.remove(row)
                self._numbers[name][row] = ROW_NUMBERS[name]
        for table in self._tables:
            table.pop(row, None)

    @property
    def _tables(self) -> tuple[dict[int, Any], ...]:
        return (
            *(self.penalised, self._bias, self._bans, self._chains, self._masks),
            *(self._thinking, self._dry, self._mirostat, self._logprob_ids),
        )

    @property
    def num_rules(self) -> int:
        """Entries of all dictionaries by row."""
        return sum(map(len, self._tables))

    def logprob_token_ids(self, row: int) -> Array | None:
        """Return the tokens whose logprobs replace the top logprobs of a row, if any."""
        return self._logprob_ids.get(row)

    # ---- masks of structured output ------------------------------------------------------------

    def set_masks(self, masks: TokenMasks | None, row_of: dict[int, int]) -> None:
        """Set the masks of one step; None: no constraints."""
        self._next_mask = {}
        if masks is not None:
            self._step_masks = masks.masks
            for seq_id, first in masks.first.items():
                self._next_mask[row_of[seq_id]] = (first, masks.counts[seq_id] - 1)

    def advance_masks(self, rows: Array) -> None:
        """Advance the masks of rows whose draft token was accepted."""
        if self._next_mask:
            for row in rows.tolist():
                if row in self._next_mask:
                    mask, num_after = self._next_mask[row]
                    self._next_mask[row] = (mask + 1, num_after - 1)

    def with_masks(self, rows: Array, accepted: Array) -> Array:
        """Clear `accepted` of the rows without a mask for the next token."""
        if self._next_mask:
            for index, row in enumerate(rows.tolist()):
                if row in self._next_mask and not self._next_mask[row][1]:
                    accepted[index] = False
        return accepted

    def _mask(self, row: int) -> Array | None:
        own, entry = self._masks.get(row), self._next_mask.get(row)
        if entry is None:
            return own
        mask = self._step_masks[entry[0]]
        return mask if own is None else mask & own

    def are_greedy(self, rows: Array) -> bool:
        """Whether `rows` sample the most likely token, independent of the tokens before it."""
        chosen = rows.tolist()
        depends = (self.penalised, self._bans, self._dry, self._thinking, self._next_mask)
        if any(row in table for table in depends if table for row in chosen):
            return False
        is_greedy = (self._numbers["temperature"][rows] == 0).all()
        return bool(is_greedy) and not self.logprob_rows(rows)

    def logprob_rows(self, rows: Array) -> list[int]:
        """Return the indices into `rows` that request logprobs."""
        if not self._users["n_logprobs"]:
            return []
        return np.flatnonzero(self._numbers["n_logprobs"][rows] >= 0).tolist()

    def metadata(
        self,
        rows: Array,  # [r]: rows to sample
        output_rows: Array,  # [r]: their rows of logits
        positions: Array,  # [r]: position of the sampled token = tokens so far
        seq_ids: Array,  # [rows]
        tokens: Array,  # [rows, length]: the tokens so far
        num_discarded: Array | None = None,  # [rows]: tokens that positions do not count; None: 0
    ) -> SamplingMetadata:
        """Build the sampler's arrays of one step; neutral parameters stay None."""
        meta = SamplingMetadata(
            rows=output_rows.astype(np.int32),
            seeds=self.seeds[rows],
            positions=positions if num_discarded is None else positions + num_discarded[rows],
            choices=self.choices[rows],
        )
        for name, users in self._users.items():
            if users:
                values = self._numbers[name][rows]
                if (values != ROW_NUMBERS[name]).any():
                    meta.numbers[name] = values
        if self.penalised:
            meta.seq_ids = seq_ids[rows]
        special = (self._bias, self._bans, self._chains, self._masks, self._thinking, self._dry)
        if any(special):
            self._add_special(meta, rows.tolist(), positions.tolist(), tokens)
        elif self._next_mask:
            self._add_step_masks(meta, rows.tolist())
        return meta

    def _add_step_masks(self, meta: SamplingMetadata, rows: list[int]) -> None:
        """Pass the masks without copies: no row has another mask or bias."""
        mask_rows = [self._next_mask.get(row, _NO_MASK)[0] for row in rows]
        if max(mask_rows) >= 0:
            meta.mask_rows = np.array(mask_rows, dtype=np.int32)
            meta.masks = self._step_masks

    def _add_special(
        self, meta: SamplingMetadata, rows: list[int], positions: list[int], tokens: Array
    ) -> None:
        if any(row in self._chains for row in rows):
            chains = [self._chains.get(row, self._default_chain) for row in rows]
            meta.chain_offsets = _offsets(chains)
            meta.chain = np.concatenate(chains)
        forced = self._forced(rows, positions, tokens)
        masks = [forced[row] if row in forced else self._mask(row) for row in rows]
        has = np.array([mask is not None for mask in masks])
        if has.any():
            meta.mask_rows = np.where(has, np.cumsum(has) - 1, -1).astype(np.int32)
            meta.masks = np.stack([mask for mask in masks if mask is not None])
        empty = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))
        biases: list[tuple[Array, Array]] = []
        for row, position in zip(rows, positions, strict=True):
            if row in forced:  # overrides bias and bans
                biases.append(empty)
                continue
            ids, values = self._bias.get(row, empty)
            bans = self._bans.get(row)
            banned = () if bans is None else bans.at(position, tokens[row])
            mask = masks[len(biases)]
            if (
                banned
                and row in self._next_mask
                and mask is not None
                and _allows_only(mask, banned)
            ):
                banned = ()  # the grammar allows only end tokens: it overrides min_tokens
            if banned:
                ids = np.concatenate([ids, np.array(banned, dtype=np.int32)])
                values = np.concatenate([values, np.full(len(banned), BAN, dtype=np.float32)])
            if row in self._dry:
                penalised, penalties = self._dry[row].at(tokens[row, :position])
                ids = np.concatenate([ids, penalised])
                values = np.concatenate([values, penalties])
            biases.append((ids, values))
        if any(len(ids) for ids, _ in biases):
            meta.bias_offsets = _offsets([ids for ids, _ in biases])
            meta.bias_ids = np.concatenate([ids for ids, _ in biases])
            meta.bias_values = np.concatenate([values for _, values in biases])

    def _forced(self, rows: list[int], positions: list[int], tokens: Array) -> dict[int, Array]:
        """Return the masks of forced tokens by row."""
        found = {}
        for row, position in zip(rows, positions, strict=True):
            budget = self._thinking.get(row)
            token = None if budget is None else budget.forced(position, tokens[row])
            if token is not None:
                found[row] = allowed_mask((token,), self.vocab_size)
        return found


def _allows_only(mask: Array, ids: tuple[int, ...]) -> bool:
    """Whether a mask allows no token other than `ids`."""
    rest = mask & ~allowed_mask(ids, 32 * len(mask))
    return not rest.any()


def allowed_mask(token_ids: tuple[int, ...] | list[int], vocab_size: int) -> Array:
    """Return [(vocab_size + 31) // 32] words with the bits of `token_ids` set."""
    mask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


def _offsets(parts: list[Array]) -> Array:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
