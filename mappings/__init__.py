"""The mapping tables that ship with the package: one TOML file for each family of checkpoints."""

__all__: list[str] = []
