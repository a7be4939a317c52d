"""The command line; each command is a thin layer over a public function."""

from porting.cli.app import main

__all__ = ["main"]
