"""The table, as a person would have written it."""

from porting.suggesting.draft.drafting import draft
from porting.suggesting.draft.writing import Draft, write

__all__ = ["Draft", "draft", "write"]
