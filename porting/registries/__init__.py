"""Registries of other libraries as tables, and tables as entries of such registries.

transformers lists, for each model type, how the tensors of its files become those of its modules.  That list is
imported as a table of rules, and a table is given back as such a list, or as vLLM's.
"""

REGISTRY = "transformers:"
"""The prefix of the name of a table made from transformers' registry."""

__all__ = ["REGISTRY"]
