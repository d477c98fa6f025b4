"""What a simulation was given, each value by itself, before anything is computed with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Final

from capplan.errors import InputError
from capplan.spec import Profile, Workload

_MOST: Final = 2**31 - 1  # of anything that is counted: rows and tokens are 32-bit numbers
_COUNT: Final = f"must be a whole number from 1 to {_MOST}"
_OPTIONAL: Final = ("max_cpu_loras", "max_in_flight")


def require_settings(workload: Workload, profile: Profile, settings: Mapping[str, Any]) -> None:
    """Check types and ranges of what a simulation was given; how values go together is not looked at.

    Parameters
    ----------
    workload, profile
        What should be a workload and a profile.
    settings
        The other arguments of `simulate` by name.

    Raises
    ------
    InputError
        Located at the argument.
    """
    if not isinstance(workload, Workload):
        raise InputError("must be a Workload, as load_workload returns it", workload, "workload")
    if not isinstance(profile, Profile):
        raise InputError("must be a Profile, as load_profile returns it", profile, "profile")
    for name, value in settings.items():
        if name == "duration_s":
            if not _is_number(value) or not 0 < value < math.inf:
                raise InputError("must be a finite number > 0", value, name)
        elif name == "gpu_memory_utilization":
            if not _is_number(value) or not 0 < value <= 1:
                raise InputError("must be a number above 0 and at most 1", value, name)
        elif name == "seed":
            if not _is_whole(value) or value < 0:
                raise InputError("must be a whole number >= 0", value, name)
        elif name == "rules":
            if not (value is None or isinstance(value, str)):
                raise InputError("must be the name of serving rules", value, name)
        elif name == "prefix_caching":
            if not (value is None or isinstance(value, bool)):
                raise InputError("must be true or false", value, name)
        elif not (value is None and name in _OPTIONAL) and not (_is_whole(value) and 1 <= value <= _MOST):
            raise InputError(_COUNT, value, name)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
