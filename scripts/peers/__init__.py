"""Parts of scripts/bench_compare_peers.py: model files, and one adapter per engine."""
