"""Owns the KV blocks: block tables of requests, prefix caching, eviction.

A block is in one of three states:

    free      reference count 0, no cached content
    used      reference count above 0; requests may share full prompt blocks
    cached    reference count 0, content of a prefix that a request may reuse (LRU)

and free + used + cached = total, which `check_integrity` verifies.

The prefix cache is a table of nodes, one per full block of tokens, keyed by a hash chained over the
blocks before it. A hash only finds candidates: a node matches when its tokens are equal and its
parent is the node matched before it, so hash collisions cost time only. The nodes of a prompt are
added when the prompt is admitted and become `ready` when computed; a request that matches a node
which is not ready waits for it instead of computing the same block.

An evicted block may be copied to a host slot (`HostBlocks`), from which a later request restores it
into a new block; its node is not ready before the step that copies it. Copies are planned here and
executed in order before the step.

Bookkeeping only: no tensors, no numpy, no clock.
"""

from collections import OrderedDict
from dataclasses import dataclass

from llaisys.common.request import Request
from llaisys.common.types import BlockCopy
from llaisys.engine.host_blocks import HostBlocks
from llaisys.engine.prefix_nodes import (
    HashFunction,
    Node,
    PrefixCacheStats,
    PrefixMatch,
    PrefixTable,
    Tokens,
    chain_hash,
    prefix_keys,
)


@dataclass(slots=True)
class _BlockTable:
    """Blocks of a request; blocks[i] covers tokens [i * block_size, (i + 1) * block_size)."""

    blocks: list[int]
    nodes: list[Node]  # of the leading full blocks; nodes[i].block may be of another request
    num_ready: int  # computed leading blocks
    is_shifted: bool = False  # new blocks depend on discarded tokens: not cached


@dataclass(slots=True)
class _Waiting:
    """What is known of a waiting request."""

    keys: list[tuple[int, Tokens]]  # see BlockManager.keys
    node: Node | None = None  # pending: another request computes its block
    num_restored: int = -1  # blocks in the KV cache before the last part was restored


class BlockManager:
    """Allocates blocks. None means "not now"; a broken invariant raises RuntimeError."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        min_match: int = 0,
        hash_function: HashFunction = chain_hash,
        context_len: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """`context_len`: maximum tokens of one request in the cache; None: no limit.
        `num_host_blocks`: host slots for evicted blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_match = min_match
        self.context_len = num_blocks * block_size if context_len is None else context_len
        self.stats = PrefixCacheStats()
        self._hash = hash_function
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._node_of: list[Node | None] = [None] * num_blocks
        self.nodes = PrefixTable()
        self.host = HostBlocks(num_host_blocks if enable_prefix_caching else 0)
        self._tables: dict[str, _BlockTable] = {}  # by request id
        self._waiting: dict[str, _Waiting] = {}  # by request id
        self._restoring: set[int] = set()  # blocks that a step restores for a waiting request

    # ---- counts --------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def first_blocks(self, request: Request) -> int:
        """Return the blocks that a request needs to start."""
        return -(-min(request.num_tokens, self.context_len) // self.block_size)

    def block_table(self, request: Request) -> list[int]:
        """Return a copy of the blocks of a request; for tests and debugging."""
        table = self._tables.get(request.request_id)
        return list(table.blocks) if table else []

    def debug_state(self) -> dict[str, int]:
        """Counts of what unfinished requests hold; 0 without one."""
        return {
            "used_blocks": self.num_used_blocks,
            "block_tables": len(self._tables),
            "prefix_matches": len(self._waiting),
        }

    def check_integrity(self) -> None:
        """Recount everything; RuntimeError with the numbers when they do not match."""
        references = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table.blocks:
                references[block] += 1
        for block in self._restoring:
            references[block] += 1
        used = sum(1 for count in references if count)
        free, cached = len(self._free), len(self._cached)
        unused = [*self._free, *self._cached]
        nodes = list(self.nodes)
        on_device = [node for node in nodes if node.block >= 0]
        if (
            references != self._references
            or free + used + cached != self.num_blocks
            or len(set(unused)) != len(unused)
            or any(references[block] for block in unused)
            or any(self._node_of[node.block] is not node for node in on_device)
            or sum(node is not None for node in self._node_of) != len(on_device)
            or not all(node.alive and (node.block >= 0 or node.host_slot >= 0) for node in nodes)
        ):
            raise RuntimeError(
                f"block accounting is broken: free {free} + used {used} + cached {cached} "
                f"!= total {self.num_blocks}, or a count differs "
                f"({sum(self._references)} counted, {sum(references)} found, {len(nodes)} nodes)"
            )
        self.host.check_integrity(nodes)

    # ---- the prefix cache ----------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Return the cached blocks that the request can start from; allocates nothing.

        The last token is always computed, because its logits are needed; every token is computed
        for prompt logprobs and mean pooling.
        """
        match = PrefixMatch()
        if not self.enable_prefix_caching or request.needs_every_token:
            return match
        parent: Node | None = None
        reachable = 0
        for key, tokens in self.keys(request):
            node = self.nodes.find(key, parent, request.prefix_salt, tokens)
            if node is None:
                break
            reachable += self.block_size
            if not match.pending and not node.is_pending:
                match.nodes.append(node)
            elif not match.pending:
                match.pending = True
                self._waiting[request.request_id].node = node
            parent = node
        if reachable < self.min_match:
            self._waiting[request.request_id].node = None
            return PrefixMatch()
        match.blocks = [node.block for node in match.nodes]
        match.num_tokens = len(match.blocks) * self.block_size
        match.num_host_tokens = match.blocks.count(-1) * self.block_size
        if self.host.num_slots and not match.pending:
            match.tail = self._find_tail(request, parent, len(match.nodes))
            if match.tail is not None:
                match.num_tokens += len(match.tail.tokens)
                match.num_host_tokens += len(match.tail.tokens)
        return match

    def is_waiting_for_prefix(self, request: Request) -> bool:
        """Whether the pending block of the last match is still being computed."""
        waiting = self._waiting.get(request.request_id)
        node = None if waiting is None else waiting.node
        return node is not None and node.alive and node.is_pending

    def forget_waiting(self, request: Request) -> None:
        self._waiting.pop(request.request_id, None)

    def undo_copies(self, copies: list[BlockCopy]) -> None:
        """Undo the copies of a failed step: free the host slots that it was to fill. Restored
        blocks belong to its requests, which have not committed them."""
        for node in self.host.undo(copies):
            self.nodes.drop(node)

    def keys(self, request: Request) -> list[tuple[int, Tokens]]:
        """Return (chained hash, tokens) of each full block of the first context, without the block
        of the last token."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            end = min(request.num_tokens, self.context_len) - 1
            tokens = request.token_ids[: end // self.block_size * self.block_size]
            keys = prefix_keys(tokens, self.block_size, request.prefix_salt, self._hash)
            waiting = self._waiting[request.request_id] = _Waiting(keys)
        return waiting.keys

    def tail(self, request: Request) -> Tokens:
        """Return the tokens of the first context after `_keys`, without the last token."""
        end = min(request.num_tokens, self.context_len) - 1
        return tuple(request.token_ids[end // self.block_size * self.block_size : end])

    def _find_tail(self, request: Request, parent: Node | None, num_nodes: int) -> Node | None:
        tokens = self.tail(request)
        if not tokens or num_nodes < len(self.keys(request)):
            return None
        key = self.key_after(parent, request, tokens)
        return self.nodes.find(key, parent, request.prefix_salt, tokens)

    def key_after(self, parent: Node | None, request: Request, tokens: Tokens) -> int:
        """Return the chained hash of tokens after the prefix that ends with `parent`."""
        return self._hash(parent.key if parent else hash(request.prefix_salt), tokens)

    def _put(self, node: Node, block: int) -> None:
        """Assign a block, not ready, to a node."""
        node.block, node.ready = block, False
        self._node_of[block] = node

    def save_to_host(self, node: Node) -> None:
        """Plan the copy of a node's ready block, unless it has one; `node.host_slot` is -1 when no
        host slot is available."""
        evicted = self.host.save(node)
        if evicted is not None:
            self.nodes.drop(evicted)

    def save_tail(self, request: Request) -> None:
        """Plan the copy of the last, partial block of a computed prompt to a host slot, for another
        engine; see `tail`."""
        table, tokens = self._tables[request.request_id], self.tail(request)
        index = len(self.keys(request))
        self.forget_waiting(request)
        if not tokens or not self.enable_prefix_caching or table.num_ready < index:
            return
        parent = table.nodes[index - 1] if index else None
        key = self.key_after(parent, request, tokens)
        if self.nodes.find(key, parent, request.prefix_salt, tokens) is not None:
            return
        node = Node(key, parent, request.prefix_salt, tokens, table.blocks[index], False)
        self.save_to_host(node)
        node.block = -1
        if node.host_slot >= 0:
            self.nodes.add(node)

    def _drop_node(self, block: int) -> None:
        """Remove the node of a block, if any."""
        node = self._node_of[block]
        if node is not None:
            node.block, node.ready = -1, False
            self._node_of[block] = None
            self.nodes.drop(node)

    # ---- restoring a prefix in parts -----------------------------------------------------------

    def can_restore_part(self, request: Request, match: PrefixMatch) -> bool:
        """Whether restoring a part of the match makes progress: the last part was not evicted."""
        return len(match.device_blocks) > self._waiting[request.request_id].num_restored

    def restore_part(self, request: Request, match: PrefixMatch, max_blocks: int) -> None:
        """Plan to restore the first host blocks of a match in the next step, before the request
        starts; they are cached when the step ends (`end_restores`). `can_allocate` must have
        returned True since the last change."""
        nodes = [node for node in match.nodes if node.block < 0][:max_blocks]
        self._waiting[request.request_id].num_restored = len(match.device_blocks)
        for block in reversed(match.device_blocks):
            if block in self._cached:
                self._cached.move_to_end(block)  # evicted last
        self.host.pin(nodes)
        blocks = self._take(len(nodes))
        for node, block in zip(nodes, blocks, strict=True):
            self._put(node, block)
        self.host.restore(nodes, blocks)
        self._restoring.update(blocks)

    def end_restores(self, copies: list[BlockCopy], is_done: bool) -> None:
        """Cache the blocks that a step restored for waiting requests; free them if it failed."""
        for copy in reversed(copies):
            if copy.block in self._restoring and not copy.to_host:
                self._restoring.remove(copy.block)
                node = self._node_of[copy.block]
                if is_done and node is not None:
                    node.ready = True
                else:
                    self._drop_node(copy.block)
                self._release([copy.block])

    # ---- blocks of a request -------------------------------------------------------------------

    def can_allocate(self, request: Request, match: PrefixMatch, spare: int = 0) -> bool:
        """Whether the request, up to its context length, fits and leaves `spare` blocks."""
        revived = sum(1 for block in match.device_blocks if not self._references[block])
        needed = self.first_blocks(request) - len(match.device_blocks)
        return needed + revived + spare <= self.num_free_blocks

    def allocate(self, request: Request, match: PrefixMatch) -> list[int]:
        """Allocate the matched blocks and new ones; return the block table. `can_allocate` must
        have returned True since the last change."""
        if request.request_id in self._tables:
            raise RuntimeError(f"request {request.request_id} has blocks already")
        for block in match.device_blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        on_host = [node for node in match.nodes if node.block < 0]
        restored = on_host if match.tail is None else [*on_host, match.tail]
        self.host.pin(restored)
        fresh = self._take(self.first_blocks(request) - len(match.device_blocks))
        for node, block in zip(on_host, fresh, strict=False):
            self._put(node, block)
        self.host.restore(restored, fresh)
        blocks = [*(node.block for node in match.nodes), *fresh[len(on_host) :]]
        num_ready = match.blocks.index(-1) if on_host else len(match.nodes)
        table = _BlockTable(blocks, list(match.nodes), num_ready)
        self._tables[request.request_id] = table
        if self.enable_prefix_caching:
            for key, tokens in self.keys(request)[len(table.nodes) :]:
                self._add_node(request, table, key, tokens)
            if request.num_cached_tokens < 0:
                self.stats.requests += 1
                self.stats.queries += request.num_prompt_tokens
                self.stats.hits += match.num_tokens
                self.stats.host_hits += match.num_host_tokens
        self.forget_waiting(request)
        return list(blocks)

    def _add_node(self, request: Request, table: _BlockTable, key: int, tokens: Tokens) -> None:
        """Add the node, not ready, of the request's next full block. An equal node with a block
        becomes the parent of the following nodes; the request keeps its own copy of the block."""
        block, salt = table.blocks[len(table.nodes)], request.prefix_salt
        parent = table.nodes[-1] if table.nodes else None
        node = self.nodes.find(key, parent, salt, tokens)
        if node is None:
            node = Node(key, parent, salt, tokens, block, False)
            self.nodes.add(node)
        if node.block < 0 or node.block == block:
            self._put(node, block)
        table.nodes.append(node)

    def slots_left(self, request: Request, spare: int) -> int:
        """Return the free slots of the request's blocks and of the free blocks beyond `spare`."""
        blocks = len(self._tables[request.request_id].blocks)
        blocks += max(0, self.num_free_blocks - spare)
        return blocks * self.block_size - request.position

    def append_slot(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate blocks for `num_tokens` tokens in all; return the added blocks, or None, without
        a change, when there are not enough."""
        blocks = self._tables[request.request_id].blocks
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return []
        if missing > self.num_free_blocks:
            return None
        added = self._take(missing)
        blocks.extend(added)
        return added

    def commit(self, request: Request, num_computed: int) -> None:
        """Mark the full blocks of the first `num_computed` tokens as ready to be shared."""
        if not self.enable_prefix_caching:
            return
        table = self._tables.get(request.request_id)
        if table is None or table.is_shifted:
            return
        size = self.block_size
        for index in range(table.num_ready, num_computed // size):
            if index == len(table.nodes):
                parent = table.nodes[-1] if table.nodes else None
                tokens = tuple(request.token_ids[index * size : (index + 1) * size])
                key = self.key_after(parent, request, tokens)
                self._add_node(request, table, key, tokens)
            if table.nodes[index].block == table.blocks[index]:
                table.nodes[index].ready = True
            table.num_ready = index + 1

    def shift(self, request: Request, keep: int, discard: int) -> list[int] | None:
        """Discard the tokens [keep, keep + discard) of a request whose blocks are full; `discard`
        is a number of whole blocks. The blocks after them change: shared ones are replaced by new
        ones, the others leave the prefix cache.

            before   [0 .. keep) [keep .. keep + discard) [keep + discard .. end)
            after    [0 .. keep)                          [keep .. end - discard)

        Returns the new blocks from that of token `keep` on, or None, without a change, when there
        are not enough for the copies. Freed blocks keep their content and may be targets of the
        copies: the worker reads all sources first.
        """
        table, size = self._tables[request.request_id], self.block_size
        first, count = keep // size, discard // size
        discarded, moved = table.blocks[first : first + count], table.blocks[first + count :]
        num_shared = sum(self._references[block] > 1 for block in moved)
        num_freed = sum(self._references[block] == 1 for block in discarded)
        if num_shared > self.num_free_blocks + num_freed:
            return None
        self._drop_unready(table)
        self._release(discarded)
        for index, block in enumerate(moved):
            if self._references[block] > 1:
                self._references[block] -= 1
                [moved[index]] = self._take(1)
            else:
                self._drop_node(block)
        table.blocks[first:] = moved
        del table.nodes[first:]
        table.num_ready = min(table.num_ready, first)
        table.is_shifted = True
        return list(moved)

    def free(self, request: Request) -> None:
        """Free the blocks of a request; computed full blocks stay cached. It may be unknown."""
        self.forget_waiting(request)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._drop_unready(table)
            self._release(table.blocks)

    def _drop_unready(self, table: _BlockTable) -> None:
        """Remove the nodes that will not be computed or restored."""
        for block in table.blocks[table.num_ready : len(table.nodes)]:
            if (node := self._node_of[block]) is not None and not node.ready:
                self._drop_node(block)

    def _release(self, blocks: list[int]) -> None:
        """Release references, the last block first: a prefix is evicted after its continuation."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block] and self._node_of[block] is None:
                self._free.append(block)
            elif not self._references[block]:
                self._cached[block] = None

    def _take(self, count: int) -> list[int]:
        """Return free blocks, then evicted least recently used ones."""
        rest = max(0, len(self._free) - count)
        taken = self._free[rest:][::-1]
        del self._free[rest:]
        taken += [self._evict() for _ in range(count - len(taken))]
        for block in taken:
            self._references[block] += 1
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        node = self._node_of[block]
        assert node is not None
        self.save_to_host(node)
        self._drop_node(block)
        self.stats.evictions += 1
        return block
