"""Reference implementation of the twin: plain lists, one request at a time, every single step."""

from tests.oracle.loop import run_reference, simulate_with_reference

__all__ = ["run_reference", "simulate_with_reference"]
