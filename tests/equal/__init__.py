"""Recordings of everything that a change of structure must leave as it is."""
