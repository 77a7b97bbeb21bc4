"""Speculative decoding: draft tokens are verified in one step with the last known token
(docs/guides/speculative_decoding.md)."""

from llaisys.engine.speculative.control import SpeculativeStats, Speculator, make_speculator
from llaisys.engine.speculative.proposer import Proposer

__all__ = ["Proposer", "SpeculativeStats", "Speculator", "make_speculator"]
