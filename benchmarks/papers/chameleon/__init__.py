"""Chameleon's evaluation (MICRO 2025) with the twin: setting, systems, knees, table of its figures."""
