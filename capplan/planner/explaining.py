"""Deprecated name of `capplan.planner.explain`."""

import warnings

from capplan.planner.explain import *  # noqa: F403

warnings.warn(
    "capplan.planner.explaining is deprecated: use capplan.planner.explain", DeprecationWarning, stacklevel=2
)
