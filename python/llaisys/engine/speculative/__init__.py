"""Drafts: tokens that are guessed, computed together with the last known one and kept when they are
what is drawn anyway. See docs/guides/speculative_decoding.md."""

from llaisys.engine.speculative.control import SpeculativeStats, Speculator, make_speculator
from llaisys.engine.speculative.proposer import Proposer

__all__ = ["Proposer", "SpeculativeStats", "Speculator", "make_speculator"]
