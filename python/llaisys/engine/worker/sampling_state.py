"""Per-row sampling parameters, and the sampler's arrays built from them.

Numbers that every row has stand in arrays by row and are gathered; what few rows have (bias, bans,
masks, an own chain, penalties) stands in dictionaries, and only those rows cost Python work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.sampling import BAN, DEFAULT_SAMPLERS, FIELDS, SamplerKind
from llaisys.common.step import ROW_NUMBERS, SamplingMetadata, TokenMasks
from llaisys.common.types import NewSequence
from llaisys.engine.worker.bad_words import START, WordAutomaton, automaton_of
from llaisys.engine.worker.thinking import ThinkingBudget

Array = NDArray[Any]

# Field of SamplingParams -> the sampler's array.
_ARRAYS = {name: about.array for name, about in FIELDS.items() if about.array is not None}
_KINDS = {name: SamplerKind[name.upper()] for name in DEFAULT_SAMPLERS}


@dataclass(slots=True)
class _Bans:
    """Tokens that may not come next, depending on what came before. Positions are those of the row,
    so they move with its context."""

    first: int  # position of the first drawn token; words are looked for from there on
    until: int  # position before which `stops` are banned (min_tokens)
    stops: tuple[int, ...]
    words: WordAutomaton | None  # of the words of two or more tokens
    position: int  # the tokens in [first, position) led to `state`
    state: int = START
    before: int = START  # the state at `first`

    def at(self, position: int, tokens: Array) -> tuple[int, ...]:
        """The tokens that may not stand at `position`; `tokens`: those before it."""
        stops = self.stops if position < self.until else ()
        if self.words is None:
            return stops
        self._read(position, tokens)
        return stops + self.words.banned(self.state)

    def shift(self, length: int, dropped: int, tokens: Array) -> None:
        """A context of `length` tokens is about to lose `dropped` of them."""
        if self.words is not None:
            self._read(length, tokens)
        self.first = self.position = length - dropped
        self.until -= dropped
        self.before = self.state

    def _read(self, position: int, tokens: Array) -> None:
        assert self.words is not None
        if position < self.position:  # tokens were taken back
            self.position, self.state = self.first, self.before
        for token in tokens[self.position : position].tolist():
            self.state = self.words.step(self.state, token)
        self.position = position


_NO_MASK = (-1, 0)


class SamplingState:
    """What the sampler needs to know of each row of `InputBatch`."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._numbers = {
            name: np.full(max_rows, neutral, dtype=np.float64)
            for name, neutral in ROW_NUMBERS.items()
        }
        # Rows whose number is not the neutral one: a field that nobody uses costs a step nothing.
        self._users: dict[str, set[int]] = {name: set() for name in ROW_NUMBERS}
        self.seeds = np.zeros(max_rows, dtype=np.uint64)
        self.choices = np.zeros(max_rows, dtype=np.int32)
        self.penalised: set[int] = set()  # rows whose history the sampler keeps
        self._bias: dict[int, tuple[Array, Array]] = {}
        self._bans: dict[int, _Bans] = {}
        self._chains: dict[int, Array] = {}
        self._masks: dict[int, Array] = {}
        self._thinking: dict[int, ThinkingBudget] = {}
        self._named: dict[int, Array] = {}  # tokens whose logprobs are wanted
        # Of this step: the masks, and for each row with some, which is next and how many follow it.
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
            if value is not None and value != ROW_NUMBERS[array]:
                self._numbers[array][row] = value
                self._users[array].add(row)
        self.seeds[row] = seq.seed
        self.choices[row] = seq.choice
        if params.uses_penalties:
            self.penalised.add(row)
        if params.samplers is not None and tuple(params.samplers) != DEFAULT_SAMPLERS:
            self._chains[row] = self._chain(tuple(params.samplers))
        if params.allowed_token_ids is not None:
            self._masks[row] = allowed_mask(params.allowed_token_ids, self.vocab_size)
        if params.logprob_token_ids is not None:
            self._named[row] = np.array(params.logprob_token_ids, dtype=np.int64)
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

    def shift(self, row: int, length: int, dropped: int, tokens: Array) -> None:
        """The context of a row has `length` tokens and is about to lose `dropped` of them."""
        for table in (self._bans, self._thinking):
            if row in table:
                table[row].shift(length, dropped, tokens)

    def release(self, row: int) -> None:
        for name, users in self._users.items():
            if row in users:
                users.remove(row)
                self._numbers[name][row] = ROW_NUMBERS[name]
        self.penalised.discard(row)
        special = (self._bias, self._bans, self._chains, self._masks, self._thinking, self._named)
        for table in special:
            table.pop(row, None)

    def named_tokens(self, row: int) -> Array | None:
        """The tokens whose logprobs a row wants instead of those of the best."""
        return self._named.get(row)

    # ---- what answers of this step must look like ----------------------------------------------

    def set_masks(self, masks: TokenMasks | None, row_of: dict[int, int]) -> None:
        """For the draws of one step; None: every token may come, as far as these are concerned."""
        self._next_mask = {}
        if masks is not None:
            self._step_masks = masks.masks
            for seq_id, first in masks.first.items():
                self._next_mask[row_of[seq_id]] = (first, masks.counts[seq_id] - 1)

    def advance_masks(self, rows: Array) -> None:
        """The next draw of `rows` is behind a draft that was accepted."""
        if self._next_mask:
            for row in rows.tolist():
                if row in self._next_mask:
                    mask, behind = self._next_mask[row]
                    self._next_mask[row] = (mask + 1, behind - 1)

    def with_masks(self, rows: Array, agreed: Array) -> Array:
        """`agreed` without the rows that have no mask for another draw."""
        if self._next_mask:
            for index, row in enumerate(rows.tolist()):
                if row in self._next_mask and not self._next_mask[row][1]:
                    agreed[index] = False
        return agreed

    def _mask(self, row: int) -> Array | None:
        own, place = self._masks.get(row), self._next_mask.get(row)
        if place is None:
            return own
        mask = self._step_masks[place[0]]
        return mask if own is None else mask & own

    def are_greedy(self, rows: Array) -> bool:
        """Whether what `rows` draw is the best token, whatever was drawn before it."""
        chosen = rows.tolist()
        depends = (self.penalised, self._bans, self._thinking, self._next_mask)
        if any(row in kept for kept in depends if kept for row in chosen):
            return False
        is_greedy = (self._numbers["temperature"][rows] == 0).all()
        return bool(is_greedy) and not self.logprobs_wanted(rows)

    def logprobs_wanted(self, rows: Array) -> list[int]:
        """Which of `rows` ask for log-probabilities, as indices into it."""
        if not self._users["n_logprobs"]:
            return []
        wanted: list[int] = np.flatnonzero(self._numbers["n_logprobs"][rows] >= 0).tolist()
        return wanted

    def metadata(
        self,
        rows: Array,  # [r]: rows to draw for
        output_rows: Array,  # [r]: where their logits are
        positions: Array,  # [r]: position of the token to draw = tokens so far
        seq_ids: Array,  # [rows]
        tokens: Array,  # [rows, length]: the tokens so far
        dropped: Array | None = None,  # [rows]: tokens that positions do not count; None: nowhere
    ) -> SamplingMetadata:
        """The sampler's arrays for one step; what is neutral for every row stays None."""
        meta = SamplingMetadata(
            rows=output_rows.astype(np.int32),
            seeds=self.seeds[rows],
            positions=positions if dropped is None else positions + dropped[rows],
            choices=self.choices[rows],
        )
        for name, users in self._users.items():
            if users:
                values = self._numbers[name][rows]
                if (values != ROW_NUMBERS[name]).any():
                    meta.numbers[name] = values
        if self.penalised:
            meta.seq_ids = seq_ids[rows]
        if self._bias or self._bans or self._chains or self._masks or self._thinking:
            self._add_special(meta, rows.tolist(), positions.tolist(), tokens)
        elif self._next_mask:
            self._add_step_masks(meta, rows.tolist())
        return meta

    def _add_step_masks(self, meta: SamplingMetadata, rows: list[int]) -> None:
        """The masks as they are, where nothing else is special about any row."""
        places = [self._next_mask.get(row, _NO_MASK)[0] for row in rows]
        if max(places) >= 0:
            meta.mask_rows = np.array(places, dtype=np.int32)
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
            if row in forced:  # whatever else is asked for
                biases.append(empty)
                continue
            ids, values = self._bias.get(row, empty)
            bans = self._bans.get(row)
            banned = () if bans is None else bans.at(position, tokens[row])
            mask = masks[len(biases)]
            if banned and row in self._next_mask and mask is not None and _only(mask, banned):
                banned = ()  # min_tokens gives way to an answer that can only end
            if banned:
                ids = np.concatenate([ids, np.array(banned, dtype=np.int32)])
                values = np.concatenate([values, np.full(len(banned), BAN, dtype=np.float32)])
            biases.append((ids, values))
        if any(len(ids) for ids, _ in biases):
            meta.bias_offsets = _offsets([ids for ids, _ in biases])
            meta.bias_ids = np.concatenate([ids for ids, _ in biases])
            meta.bias_values = np.concatenate([values for _, values in biases])

    def _forced(self, rows: list[int], positions: list[int], tokens: Array) -> dict[int, Array]:
        """Row -> the mask of the one token that must come next there."""
        found = {}
        for row, position in zip(rows, positions, strict=True):
            budget = self._thinking.get(row)
            token = None if budget is None else budget.forced(position, tokens[row])
            if token is not None:
                found[row] = allowed_mask((token,), self.vocab_size)
        return found


def _only(mask: Array, ids: tuple[int, ...]) -> bool:
    """Whether a mask allows nothing but `ids`."""
    rest = mask & ~allowed_mask(ids, 32 * len(mask))
    return not rest.any()


def allowed_mask(token_ids: tuple[int, ...] | list[int], vocab_size: int) -> Array:
    """[(vocab_size + 31) // 32] words with the bits of `token_ids` set."""
    mask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


def _offsets(parts: list[Array]) -> Array:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
