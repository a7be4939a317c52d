"""Pages to look at in a browser: each is one file that needs nothing beside itself."""

from porting.pages.page import render_page

__all__ = ["render_page"]
