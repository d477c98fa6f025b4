"""A GPU for every instance of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from capplan.engine.cluster.instances import InstanceSpec
from capplan.errors import InputError


def spread_over_gpus(specs: Sequence[InstanceSpec]) -> tuple[InstanceSpec, ...]:
    """Return instances with a GPU of its own for each whose device is ``cuda``, in order.

    Raises
    ------
    InputError
        When there are fewer GPUs than that.
    """
    wanting = [spec.name for spec in specs if spec.engine.get("device") == "cuda"]
    if len(wanting) > torch.cuda.device_count():
        rule = (
            f"needs {len(wanting)} GPUs, one per instance, and there are {torch.cuda.device_count()}; "
            "cuda:0 puts all on the first"
        )
        raise InputError(rule, "cuda", "--device")
    device = {name: f"cuda:{number}" for number, name in enumerate(wanting)}
    return tuple(
        replace(spec, engine={**spec.engine, "device": device[spec.name]}) if spec.name in device else spec
        for spec in specs
    )
