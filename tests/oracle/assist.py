"""Reference of batches of prompts that CPU cores assist: lists of groups, one layer after the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from capplan.twin.instance._assist import CpuAssist
from tests.oracle.host_link import ReferenceCopier


def groups_in_time(layers: int, cpu_ns: int, gpu_ns: int, copy_ns: int, first: int) -> list[int] | None:
    """Return the groups from the first one; None if a copy takes longer than the group before it."""
    groups = [first]
    while sum(groups) < layers:
        computing_ns = groups[-1] * (cpu_ns if len(groups) == 1 else gpu_ns)
        size = computing_ns // max(1, copy_ns)
        if size == 0:
            return None
        groups.append(min(size, layers - sum(groups)))
    return groups


def chosen_groups(layers: int, cpu_ns: int, gpu_ns: int, copy_ns: int) -> list[int]:
    """Return the groups with the fewest layers on the CPU."""
    found = (groups_in_time(layers, cpu_ns, gpu_ns, copy_ns, first) for first in range(1, layers + 1))
    return next(groups for groups in found if groups is not None)


class AssistedPrompt:
    """One prompt whose adapter is being copied."""

    def __init__(
        self, assist: CpuAssist, adapter: int, tokens: int, load_ns: int, ready_ns: int, step_ns: int
    ) -> None:
        slices = ceil(tokens / assist.tokens_per_task)
        self.tasks = int(assist.modules[adapter]) * slices
        largest = min(tokens, assist.tokens_per_task)
        self.task_ns = assist.base_ns + round(largest * float(assist.token_ns[adapter]))
        gpu_ns = step_ns // assist.layers
        cpu_ns = max(gpu_ns, ceil(self.tasks / assist.workers) * self.task_ns) + assist.signal_ns
        first, *others = chosen_groups(assist.layers, cpu_ns, gpu_ns, load_ns // assist.layers)
        self.copied_ns = [ready_ns] * first
        copied = 0
        for size in others:
            copied += size
            self.copied_ns += [ready_ns - load_ns + load_ns * copied // assist.layers] * size


def assisted_ns(
    assist: CpuAssist,
    copier: ReferenceCopier,
    prompts: Sequence[tuple[int, int]],
    load_ns: Sequence[int],
    now_ns: int,
    step_ns: int,
) -> int:
    """Return the duration of a batch; `prompts` are (adapter, tokens) of those with a copy in progress."""
    cold = [
        AssistedPrompt(
            assist, adapter, tokens, load_ns[adapter], now_ns + copier.wait_ns(adapter, now_ns), step_ns
        )
        for adapter, tokens in prompts
    ]
    passed_ns = 0
    for layer in range(assist.layers):
        late = [each for each in cold if each.copied_ns[layer] > now_ns + passed_ns]
        layer_ns = step_ns * (layer + 1) // assist.layers - step_ns * layer // assist.layers
        if late:
            rounds = ceil(sum(each.tasks for each in late) / assist.workers)
            layer_ns = max(layer_ns, rounds * max(each.task_ns for each in late)) + assist.signal_ns
        passed_ns += layer_ns
    return passed_ns
