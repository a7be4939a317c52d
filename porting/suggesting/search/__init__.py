"""The search: which weight of the module is which of the checkpoint's."""

from porting.suggesting.search.finding import Found
from porting.suggesting.search.search import Search

__all__ = ["Found", "Search"]
