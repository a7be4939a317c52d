"""The search: which weight of the module is which of the checkpoint's."""

from porting.suggesting.search.search import WeightSearch
from porting.suggesting.search.search_result import SearchResult

__all__ = ["SearchResult", "WeightSearch"]
