"""Measured serving data of others, one module per source, and their simulation by the twin."""
