"""The table, as a person would have written it."""

from porting.suggesting.draft.table_draft import draft
from porting.suggesting.draft.table_writer import TableDraft, write

__all__ = ["TableDraft", "draft", "write"]
