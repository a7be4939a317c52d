"""The mapping notation: tables, parsed from TOML into frozen, typed objects.  ``docs/notation.md`` is its reference."""

from porting.notation.faults import NotationError, TableError
from porting.notation.rule import Rule, Term
from porting.notation.table import Table, parse_table, read_table

__all__ = ["NotationError", "Rule", "Table", "TableError", "Term", "parse_table", "read_table"]
