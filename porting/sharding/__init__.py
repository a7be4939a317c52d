"""Sharded modules: each process reads and writes only the bytes of its own shards."""

__all__: list[str] = []
