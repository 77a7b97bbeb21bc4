"""Benchmarks behind `llaisys bench`: operators, one model's latency, the engine's throughput."""
