"""Decisions recorded from vLLM's own scheduler, and their replay: ``python -m tests.golden FILE...``."""
