"""Reference implementation of the twin: plain lists, one request at a time, every single step."""

from capplan.twin.reference.loop import run_reference

__all__ = ["run_reference"]
