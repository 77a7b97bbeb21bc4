"""Modules of scripts/soak.py: the server under test, its traffic, and the final checks."""
