"""Testing a user's own test: every mistake of the catalogue is planted into the port, and the test has to notice."""

from porting.mutating.mutate import Mutation, MutationError, Score, mutate

__all__ = ["Mutation", "MutationError", "Score", "mutate"]
