"""Mutation testing of a user's own tests: mistakes are planted into the port, and the tests have to fail."""

from porting.mutating.mutate import Mutation, MutationError, Score, mutate

__all__ = ["Mutation", "MutationError", "Score", "mutate"]
