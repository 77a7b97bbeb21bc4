"""OLMo 3: OLMo 2 with windows in three of four layers; the others may scale RoPE."""

from __future__ import annotations

from dataclasses import replace

from llaisys.models.families.olmo2 import OLMO2
from llaisys.models.families.rope import rope_section
from llaisys.models.families.variant import Keys, RopeLayout, Sizes
from llaisys.models.families.windows import pattern_windows

_THETA = 500000.0


def olmo3_layout(keys: Keys, sizes: Sizes) -> RopeLayout:
    """Scaling of RoPE applies to layers without a window only."""
    section = rope_section(keys.fields)
    local = section.section("sliding_attention")
    kind = local.string("rope_type", "default")
    if kind != "default":
        raise local.fail("rope_type", f"is {kind!r}; layers with a window support 'default' only")
    holder = next((f for f in (local, section) if f.has("rope_theta")), keys.fields)
    theta = holder.number("rope_theta", 1e-3, 1e12, _THETA)
    return RopeLayout(window_theta=theta, scales_q_norm=True)


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    windows=pattern_windows(4096, 4),
    rope_layout=olmo3_layout,
    has_window_rope=True,
    defaults={**OLMO2.defaults, "rope_theta": _THETA},
    has_gguf_files=False,  # they have the architecture of OLMo 2
)
