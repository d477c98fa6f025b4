"""A plan's groups one after the other: a server, the twin's very requests, and the twin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.profiling.engine.process import running_server
from capplan.profiling.load.bench import BenchOptions, bench
from capplan.profiling.load.result import BenchResult
from capplan.profiling.load.run import OnTick
from capplan.profiling.load.schedule import schedule_of
from capplan.profiling.load.settings import LoadSettings, Target
from capplan.profiling.server.info import engine_info
from capplan.profiling.validation.compare import (
    GroupValidation,
    compared,
    constant_step,
    faults_of,
    measured_values,
    offered_values,
    predicted_values,
)
from capplan.profiling.validation.instances import (
    chosen_groups,
    group_workload,
    server_command,
    twin_settings,
)
from capplan.profiling.validation.options import Options
from capplan.spec import Group, Plan, Profile, Workload
from capplan.twin import SimulationResult, simulate

_DRAIN_S: Final = 1.0
_METRICS_S: Final = 10.0
_LOOKS_S: Final = 2.0
"""Between two looks at a server's metrics: rare, since it answers them in the loop that hands out tokens."""


@dataclass(frozen=True)
class Validation:
    """All groups of a plan."""

    groups: tuple[GroupValidation, ...]
    results: Mapping[str, BenchResult]
    """What the load generator says of each."""

    @property
    def agrees(self) -> bool:
        """Whether every group agrees."""
        return all(group.agrees for group in self.groups)

    @property
    def partial(self) -> bool:
        """Whether it was interrupted; groups may be missing then."""
        return any(result.partial for result in self.results.values())


def validate(
    plan: Plan,
    workload: Workload,
    profiles: Mapping[str, Profile],
    options: Options | None = None,
    on_group: Callable[[str], None] = lambda _: None,
    on_tick: OnTick | None = None,
) -> Validation:
    """Measure one instance of every group under the twin's requests, and compare.

    In the main thread an interrupt (Ctrl-C) while a server is loaded ends it: that group is the last one, and
    what was found of it is void.

    Parameters
    ----------
    plan, workload
        The plan, and what it was made for: arrivals and lengths are in the workload.
    profiles
        By the names that the plan's groups give.
    options
        How long, how much, and where.
    on_group
        Told the group that comes next.
    on_tick
        Called a few times a second while a server is loaded.

    Raises
    ------
    InputError
        When plan, workload and servers do not go together.
    InfeasibleError
        When an instance would not start.
    """
    chosen = options or Options()
    groups, results = [], {}
    for group in chosen_groups(plan, chosen):
        on_group(group.id)
        one = _OneGroup(plan, group, workload, profiles[group.profile], chosen)
        result = one.measure(on_tick)
        results[group.id] = result
        groups.append(one.judged(result))
        if result.partial:
            break
    return Validation(tuple(groups), results)


class _OneGroup:
    """One instance of a group in the twin and as a server."""

    def __init__(
        self, plan: Plan, group: Group, workload: Workload, profile: Profile, options: Options
    ) -> None:
        self._plan, self._group, self._profile, self._options = plan, group, profile, options
        self._settings = twin_settings(group, options)
        self._workload = group_workload(group, workload, options.rate_scale)
        self._planned = group_workload(group, workload, 1.0)
        self._predicted = self._simulate(self._workload, profile)
        self._told_kv_tokens: int | None = None

    def _simulate(self, workload: Workload, profile: Profile) -> SimulationResult:
        fields: dict[str, Any] = {**self._settings, "rules": self._plan.engine.rules}
        options = self._options
        return simulate(workload, profile, duration_s=options.duration_s, seed=options.seed, **fields)

    def measure(self, on_tick: OnTick | None) -> BenchResult:
        """Load the instance with the twin's requests."""
        options, model_len = self._options, int(self._settings["max_model_len"])
        known = {"profile": self._profile, "max_model_len": model_len}
        schedule = schedule_of(
            self._workload, options.duration_s, options.seed, model_len, profile=self._profile
        )
        with self._server(len(schedule)) as url:
            self._told_kv_tokens = _told_kv_tokens(Target(url, options.api_key))
            return bench(
                self._workload,
                Target(url, options.api_key, self._plan.base_model),
                LoadSettings(options.duration_s, drain_s=_DRAIN_S, metrics_interval_s=_LOOKS_S),
                BenchOptions(seed=options.seed, **known),  # type: ignore[arg-type]
                on_tick=on_tick,
            )

    @contextlib.contextmanager
    def _server(self, requests: int) -> Iterator[str]:
        url = self._options.urls.get(self._group.id)
        if url is not None:
            yield url
            return
        command = server_command(
            self._plan, self._group, self._profile, self._predicted.kv_tokens, requests, self._options
        )
        with running_server(command) as address:
            yield address

    def judged(self, result: BenchResult) -> GroupValidation:
        """Compare what was measured with the twin and the baselines."""
        options, predicted = self._options, self._predicted
        plain = constant_step(self._profile, self._simulate(self._planned, self._profile))
        baseline = self._simulate(self._workload, plain)
        return GroupValidation(
            group=self._group.id,
            rate_scale=options.rate_scale,
            duration_s=options.duration_s,
            seed=options.seed,
            requests=predicted.submitted,
            comparisons=compared(
                measured_values(result, self._profile, self._told_kv_tokens, predicted.kv_tokens),
                predicted_values(predicted),
                predicted_values(baseline),
                offered_values(predicted),
                options.tolerances,
            ),
            starved=result.overall.starved,
            predicted_starved=predicted.starved,
            constant_step_starved=baseline.starved,
            faults=faults_of(result, predicted.submitted),
        )


def _told_kv_tokens(target: Target) -> int | None:
    """Return the KV capacity that a server tells at ``/metrics``; None where it does not."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    request = Request(target.at("/metrics"), headers=target.headers())  # noqa: S310 - http(s), by Target
    try:
        with urlopen(request, timeout=_METRICS_S) as response:  # noqa: S310 - likewise
            return engine_info(response.read().decode("utf-8", "replace")).kv_tokens
    except (OSError, ValueError, HTTPException):
        return None
