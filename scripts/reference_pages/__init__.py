"""Generators of docs/reference, one module for each source."""
