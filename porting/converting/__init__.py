"""Checkpoints turned into another layout and back, in fixed memory, whole or not at all."""

__all__: list[str] = []  # its modules are imported by name: some need no torch
