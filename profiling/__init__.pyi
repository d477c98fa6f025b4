from ._tables import FIRST_TOKENS, ITERATIONS, MEMORY, TABLES, MeasurementFolder, tables_of

__all__ = [
    "FIRST_TOKENS",
    "ITERATIONS",
    "MEMORY",
    "TABLES",
    "MeasurementFolder",
    "tables_of",
]
