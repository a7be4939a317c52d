"""Comparing two checkpoints value by value, and digests of their content."""

__all__: list[str] = []  # its modules are imported by name: some need no torch
