"""Calibration of a profile with the twin in the loop."""
