"""Prefixes that enter and leave the prefix cache of a block manager. Bookkeeping only."""

from __future__ import annotations

from llaisys.common.request import Request
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.prefix_nodes import Node


def export_prefix(blocks: BlockManager, request: Request) -> tuple[list[int], int]:
    """Lock host slots with the computed prefix of a prompt, without its last token; return (slots,
    tokens in them). Copies of blocks that have no slot are planned: they must be executed before
    the slots are read. Slots that are not available shorten the prefix."""
    slots: list[int] = []
    num_tokens = 0
    match = blocks.match_prefix(request)
    blocks.forget_waiting(request)
    for node in match.nodes if match.tail is None else [*match.nodes, match.tail]:
        if node.host_slot < 0 and node.block >= 0:
            blocks.save_to_host(node)
        if node.host_slot < 0:  # no slot was available, or another one took its slot
            break
        blocks.host.lock(node.host_slot)
        slots.append(node.host_slot)
        num_tokens += len(node.tokens)
    return slots, num_tokens


def reserve_prefix(blocks: BlockManager, request: Request) -> tuple[int, list[int]]:
    """Reserve host slots for the blocks of a prompt that are not cached, without its last token;
    return (number of leading blocks that are cached, slots). No slots: nothing is missing, or none
    is available."""
    match = blocks.match_prefix(request)
    num_blocks = len(blocks.keys(request)) + bool(blocks.tail(request))
    blocks.forget_waiting(request)
    if match.pending or match.tail is not None:
        return len(match.nodes), []  # another request computes it, or all is cached
    slots, evicted = blocks.host.reserve(num_blocks - len(match.nodes))
    for node in evicted:
        blocks.nodes.drop(node)
    return len(match.nodes), slots


def insert_prefix(
    blocks: BlockManager, request: Request, start: int, slots: list[int], num_tokens: int
) -> int:
    """Add the prefix nodes of received blocks from block `start` on; `num_tokens` of the prompt are
    received or were cached. Frees the slots that are not needed; returns the number of used slots.
    """
    keys, salt = list(blocks.keys(request)), request.prefix_salt
    tail = blocks.tail(request)
    blocks.forget_waiting(request)
    parent: Node | None = None
    for key, tokens in keys[:start]:
        parent = blocks.nodes.find(key, parent, salt, tokens)
        if parent is None:  # evicted meanwhile
            num_tokens = 0
            break
    found = keys[start : num_tokens // blocks.block_size]
    if tail and num_tokens == len(keys) * blocks.block_size + len(tail):
        found.append((-1, tail))
    used: list[Node] = []
    for slot, (key, tokens) in zip(slots, found, strict=False):
        if tokens is tail:
            key = blocks.key_after(parent, request, tail)
        node = blocks.nodes.find(key, parent, salt, tokens)
        if node is None:
            node = Node(key, parent, salt, tokens, -1, False)
            blocks.nodes.add(node)
        if node.host_slot < 0:
            blocks.host.fill(slot, node)
            used.append(node)
        else:
            blocks.host.cancel([slot])
        parent = node
    blocks.host.cancel(slots[len(found) :])
    blocks.host.touch(used)
    return len(used)
