"""RoPE of the first values of a head (`partial_rotary_factor`)."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.rope import partial_rotary_factor
from llaisys.models.families.variant import Keys, RopeLayout, Sizes


def partial_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """Pairs (i, i + rotary_dim / 2)."""
    if keys.arch:
        rotated = keys.integer("", "rope.dimension_count", sizes.head_dim, sizes.head_dim)
    else:
        rotated = int(sizes.head_dim * partial_rotary_factor(keys.fields))
    return RopeLayout(rotary_dim=rotated)


def interleaved_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """Pairs (2i, 2i + 1)."""
    return replace(partial_layout(keys, sizes), is_interleaved=True)
