"""Search of scheduler and cache settings on the requests of a workload, against held-out windows.

The requests are cut into windows of equal length. Even windows are for the search, odd ones are held out. The
objective is the P99 TTFT over all requests of the search windows, each simulated from an idle engine. Each
begins with the queues that the settings give for the first window, as instances of a plan do with theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.pooled import RequestSample, new_queues
from capplan.spec import (
    CHAMELEON_WEIGHTS,
    MOST_QUEUES,
    Cache,
    EngineArgs,
    Profile,
    Queues,
    Scheduler,
    Workload,
    allowed_lora_rank,
)
from capplan.twin.instance import (
    NEVER,
    NS_PER_S,
    STATUS_REJECTED,
    Scenario,
    build_scenario,
    choose_policies,
    draw_for,
    run,
    with_predictions,
)
from capplan.workload import Requests

if TYPE_CHECKING:
    from optuna import Trial

_POLICY: Final = "chameleon"
_REFRESHES_S: Final = (30.0, 60.0, 120.0, 300.0, 600.0)
_STEP: Final = 0.05
_PERCENT: Final = 99.0


@dataclass(frozen=True)
class TuneOptions:
    """Settings of the search."""

    duration_s: float = 3600.0
    """Requests of so much time: of the trace, or drawn."""
    windows: int = 4
    trials: int = 40
    timeout_s: float | None = None
    """Time after which no further trial starts."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.windows < 2:
            raise InputError("must be at least 2: one to search on, one held out", self.windows, "--windows")
        if self.trials < 1:
            raise InputError("must be a whole number >= 1", self.trials, "--trials")
        if self.timeout_s is not None and not 0.0 < self.timeout_s < float("inf"):
            raise InputError("must be a number of seconds above 0", self.timeout_s, "--time-limit")


@dataclass(frozen=True)
class Settings:
    """Scheduler and cache, with the P99 TTFT under them."""

    scheduler: Scheduler
    cache: Cache
    search_p99_s: float
    held_out_p99_s: float
    """Infinite if 1 % of the requests are rejected."""


@dataclass(frozen=True)
class TuningResult:
    """Result of the search."""

    found: Settings
    before: Settings
    """The workload's own settings, or the defaults, which are the paper's."""
    trials: int
    windows: int
    window_s: float


def tune(
    workload: Workload,
    profile: Profile,
    options: TuneOptions | None = None,
    on_trial: Callable[[int, int], None] | None = None,
) -> TuningResult:
    """Search weights of request sizes and cache scores, the refresh period and the number of queues.

    Where the profile knows the CPU's cores, loads that they assist are tried, too, unless the cache says how
    it loads.

    Parameters
    ----------
    workload
        With the policies ``chameleon``, which absent keys count as; its other settings of them are kept.
    profile
        Hardware, model and engine.
    options
        Settings of the search.
    on_trial
        Called after every trial with the number of trials done and their total.

    Raises
    ------
    InputError
        For other policies, or windows without requests.
    """
    given = options or TuneOptions()
    pair, asked = workload.scheduling, workload.scheduler is not None or workload.queues is not None
    scheduler = pair[0] if pair is not None and asked else Scheduler(policy=_POLICY)
    cache = workload.cache or Cache(policy=_POLICY)
    for name, policy in (("scheduler", scheduler.policy), ("cache", cache.policy)):
        if policy != _POLICY:
            raise InputError(f"must be {_POLICY}, whose settings are searched", policy, name)
    bench = _Bench(
        workload, profile, _engine(workload, profile), *_windows(workload, profile, given), given.seed
    )
    found, trials = _search(bench, scheduler, cache, given, on_trial)
    return TuningResult(
        bench.settings(*found), bench.settings(scheduler, cache), trials, given.windows, bench.window_s
    )


@dataclass(frozen=True, eq=False)
class _Bench:
    """Windows of requests on one instance."""

    workload: Workload
    profile: Profile
    args: EngineArgs
    windows: Sequence[Requests]
    window_s: float
    seed: int

    def p99_s(self, scheduler: Scheduler, cache: Cache, first: int) -> float:
        """Return the P99 TTFT over every second window from `first`, each begun with the first queues."""
        queues = self._first_queues(scheduler, cache)
        parts = [self._ttft_s(scheduler, cache, queues, window) for window in self.windows[first::2]]
        return float(np.percentile(np.concatenate(parts), _PERCENT, method="higher"))

    def settings(self, scheduler: Scheduler, cache: Cache) -> Settings:
        return Settings(scheduler, cache, *(self.p99_s(scheduler, cache, first) for first in (0, 1)))

    def _first_queues(self, scheduler: Scheduler, cache: Cache) -> Queues | None:
        """Return the queues of a refresh after the first search window; None if it has too few requests."""
        scenario = self._scenario(scheduler, cache, None, self.windows[0])
        trace, requests, pool = run(scenario), scenario.requests, scenario.pool
        if pool is None:
            return None
        done = trace.finish_ns != NEVER
        outputs = requests.predicted_tokens if requests.predicted_tokens.size else requests.output_tokens
        sample = RequestSample(
            prompt_tokens=requests.prompt_tokens.astype(np.int64),
            output_tokens=outputs.astype(np.int64),
            adapter=requests.adapter.astype(np.int64),
            execution_s=np.where(done, trace.finish_ns - trace.admitted_ns, np.nan) / NS_PER_S,
            adapter_bytes=pool.adapter_bytes,
            adapter_tokens=pool.adapter_tokens,
        )
        tokens = scenario.num_blocks * scenario.limits.block_size
        made = new_queues(sample, requests.adapter.size / self.window_s, tokens, scheduler)
        return None if made is None else made.classes.queues(made.quotas, scheduler.queues.adapter_charge)

    def _ttft_s(
        self, scheduler: Scheduler, cache: Cache, queues: Queues | None, window: Requests
    ) -> NDArray[np.float64]:
        """Return the TTFT, or the wait so far; infinite if rejected."""
        scenario = self._scenario(scheduler, cache, queues, window)
        trace = run(scenario)
        answered = (trace.first_ns >= 0) & (trace.first_ns <= scenario.horizon_ns)
        until_ns = np.where(answered, trace.first_ns, scenario.horizon_ns)
        waited_s = (until_ns - window.arrival_ns) / NS_PER_S + self.profile.host.value("request_ms") / 1e3
        return np.where(trace.status == STATUS_REJECTED, np.inf, waited_s)

    def _scenario(
        self, scheduler: Scheduler, cache: Cache, queues: Queues | None, window: Requests
    ) -> Scenario:
        policies = choose_policies(
            self.workload, self.profile, scheduler=scheduler, cache=cache, queues=queues
        )
        return build_scenario(
            self.workload,
            self.profile,
            self.args,
            duration_s=self.window_s,
            seed=self.seed,
            requests=with_predictions(self.workload, window, policies.predictor, self.seed),
            policies=policies,
        )


def _engine(workload: Workload, profile: Profile) -> EngineArgs:
    """Return the engine of the workload; adapters and KV share its memory, so slots do not count."""
    largest = allowed_lora_rank(max((adapter.rank for adapter in workload.adapters), default=1))
    longest = profile.model.default_max_model_len
    return workload.engine.complete(max(1, len(workload.adapters)), largest, longest)


def _windows(workload: Workload, profile: Profile, options: TuneOptions) -> tuple[list[Requests], float]:
    """Return the requests of each window, with arrivals from its start, and its length."""
    longest = workload.engine.max_model_len or profile.model.default_max_model_len
    requests = draw_for(workload, profile, options.duration_s, options.seed, longest)
    window_s = options.duration_s / options.windows
    edges_ns = np.arange(options.windows + 1) * window_s * NS_PER_S
    edges = np.searchsorted(requests.arrival_ns, edges_ns)
    windows = []
    for number in range(options.windows):
        rows = slice(edges[number], edges[number + 1])
        window = requests._replace(**{name: getattr(requests, name)[rows] for name in _COLUMNS})
        if window.arrival_ns.size == 0:
            rule = f"must give every one of the {options.windows} windows requests"
            raise InputError(rule, options.duration_s, "--duration")
        windows.append(window._replace(arrival_ns=window.arrival_ns - round(edges_ns[number])))
    return windows, window_s


_COLUMNS: Final = ("arrival_ns", "adapter", "prompt_tokens", "output_tokens")


def _search(
    bench: _Bench,
    scheduler: Scheduler,
    cache: Cache,
    options: TuneOptions,
    on_trial: Callable[[int, int], None] | None,
) -> tuple[tuple[Scheduler, Cache], int]:
    """Return the best settings, no worse than those given on the search windows, and the trials done."""
    import optuna

    refreshes = [period for period in _REFRESHES_S if period <= bench.window_s / 2.0] or [
        bench.window_s / 2.0
    ]
    may_assist = bench.profile.cpu_lora is not None and not scheduler.chunked
    free = may_assist and "loading" not in cache.model_fields_set
    loadings = ("asynchronous", "assisted") if free else ()
    best = (scheduler, cache)
    lowest_s = bench.p99_s(scheduler, cache, 0)
    started = time.monotonic()
    done = 0
    with _silent_optuna():
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=options.seed))
        while done < options.trials:
            if options.timeout_s is not None and time.monotonic() - started > options.timeout_s:
                break
            trial = study.ask()
            proposed = _proposed(trial, scheduler, cache, refreshes, loadings)
            p99_s = bench.p99_s(*proposed, 0)
            study.tell(trial, min(p99_s, 2.0 * bench.window_s))
            if p99_s < lowest_s:
                best, lowest_s = proposed, p99_s
            done += 1
            if on_trial is not None:
                on_trial(done, options.trials)
    return best, done


def _proposed(
    trial: Trial,
    scheduler: Scheduler,
    cache: Cache,
    refreshes_s: Sequence[float],
    loadings: Sequence[str],
) -> tuple[Scheduler, Cache]:
    """Return the settings of a trial; `loadings` are the policies to choose from, none: the cache's own."""

    def share(name: str, least: float) -> float:
        return round(trial.suggest_float(name, least, 1.0, step=_STEP), 2)

    queues = scheduler.queues.replace(
        prompt_weight=share("prompt_weight", 0.0),
        clusters="wcss",
        max_queues=trial.suggest_int("queues", 1, MOST_QUEUES),
    )
    period_s = trial.suggest_categorical("refresh_s", refreshes_s)
    weights = {name: share(name, _STEP) for name in CHAMELEON_WEIGHTS}
    loading = {"loading": trial.suggest_categorical("loading", loadings)} if loadings else {}
    return scheduler.replace(queues=queues, refresh_s=period_s), cache.replace(weights=weights, **loading)


@contextmanager
def _silent_optuna() -> Iterator[None]:
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def fragment(settings: Settings, folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Return the keys ``scheduler`` and ``cache`` of a workload file in `folder`, without defaults.

    The file of a learned predictor is relative to the folder, as the workload file has it, unless it is
    elsewhere.
    """
    scheduler = settings.scheduler.model_dump(mode="json", exclude_defaults=True)
    file = settings.scheduler.predictor.file
    if file is not None and Path(file).is_relative_to(folder):
        scheduler["predictor"]["file"] = str(Path(file).relative_to(folder))
    return {"scheduler": scheduler, "cache": settings.cache.model_dump(mode="json", exclude_defaults=True)}
