"""The parts of scripts/soak.py: the server under test, its traffic, and the checks at the end."""
