"""The commands of capplan: parse, call one library function, show the result."""

from capplan.cli.app import main

__all__ = ["main"]
