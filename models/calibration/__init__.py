"""Least-squares calibration: input tables, step model and the other components of a profile."""
