from ._adapter import GROUPS, MODULES, SITES, A, AdapterLayout, B, HostAdapter, PeftFolder
from ._load_times import LoadTimes
from ._memory import Expand, RowTables, Shrink, SiteViews
from ._store import AdapterStore, IncomingAdapter

__all__ = [
    "GROUPS",
    "MODULES",
    "SITES",
    "A",
    "AdapterLayout",
    "AdapterStore",
    "B",
    "Expand",
    "HostAdapter",
    "IncomingAdapter",
    "LoadTimes",
    "PeftFolder",
    "RowTables",
    "Shrink",
    "SiteViews",
]
