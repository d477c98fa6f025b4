from ._runs import (
    GROUPS,
    LENGTHS,
    MAX_NUM_SEQS,
    PROMPT_TOKENS,
    PUBLISHED,
    TABLES,
    TOKEN_BUDGET,
    UTILIZATION,
    PublishedModel,
    PublishedRun,
    published_runs,
    write_tables,
)

__all__ = [
    "GROUPS",
    "LENGTHS",
    "MAX_NUM_SEQS",
    "PROMPT_TOKENS",
    "PUBLISHED",
    "TABLES",
    "TOKEN_BUDGET",
    "UTILIZATION",
    "PublishedModel",
    "PublishedRun",
    "published_runs",
    "write_tables",
]
