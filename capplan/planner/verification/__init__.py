"""Verification of placements by the twin, and their repair."""
