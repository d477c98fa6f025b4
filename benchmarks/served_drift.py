"""A served plan under a workload whose popular adapters change, for ``benchmarks.running_cluster``."""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.moving_cluster import ADMIN_KEY, make_adapters
from capplan import Adapter, Lengths, Workload, load_profile
from capplan.profiling.load import BenchOptions, LoadSettings, Target, bench
from capplan.profiling.server._process import ServerCommand, flag_words, run_capplan, running_server
from capplan.registry import AdapterRegistry
from capplan.spec import PLAN_ROUTER, Trace, write_text_atomic, zipf

RANKS: Final = (8, 16, 32)
PROMPT: Final = Lengths(mean=60.0, std=30.0)
OUTPUT: Final = Lengths(mean=40.0, std=20.0)
MAX_MODEL_LEN: Final = 512
KV_BLOCKS: Final = 512
_DRAIN_S: Final = 30.0
_PINNED_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Drift:
    """Popularity that changes: in each phase the adapters share the requests by Zipf's law, in another order.

    Attributes
    ----------
    onto_one
        From the second phase on the popular adapters are those of the first instance, and only these phases
        are measured.
    """

    duration_s: float
    phase_s: float
    seed: int = 0
    onto_one: bool = False

    @property
    def warm_up_s(self) -> float:
        """Time that is not measured."""
        return self.phase_s if self.onto_one else 0.0

    def shares(self, phase: int, held: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """Return the share of each adapter; `held`: adapters of each instance at first."""
        adapters = sum(map(len, held))
        if self.onto_one and phase > 0:
            order = [number for own in held for number in own]
        else:
            turns = max(map(len, held))
            order = [own[turn] for turn in range(turns) for own in held if turn < len(own)]
            order = list(np.roll(order, -phase * (adapters // 4)))
        shares = np.empty(adapters)
        shares[order] = zipf(adapters, 1.0)
        return shares

    def trace(self, names: Sequence[str], rate_rps: float, held: Sequence[Sequence[int]]) -> Trace:
        """Return the requests: Poisson arrivals, gamma lengths."""
        rng = np.random.default_rng(self.seed)
        number = rng.poisson(rate_rps * self.duration_s)
        arrival_s = np.sort(rng.uniform(0.0, self.duration_s, number))
        phases = (arrival_s // self.phase_s).astype(int)
        adapter = np.empty(number, int)
        for phase in np.unique(phases):
            there = phases == phase
            adapter[there] = rng.choice(len(names), there.sum(), p=self.shares(int(phase), held))
        lengths = [_lengths(rng, each, number) for each in (PROMPT, OUTPUT)]
        return Trace.from_arrays(arrival_s, [names[a] for a in adapter], *lengths, self.duration_s)


def _lengths(rng: np.random.Generator, lengths: Lengths, number: int) -> NDArray[np.int64]:
    shape = (lengths.mean / (lengths.std or 1.0)) ** 2
    drawn = rng.gamma(shape, lengths.mean / shape, number)
    return np.clip(np.round(drawn), 1, MAX_MODEL_LEN // 2 - 1).astype(np.int64)


@dataclass(frozen=True)
class ClusterSetting:
    """A plan of equal instances on the profile of this machine, its model, and adapters below a folder."""

    top: Path
    model: str
    profile: Path
    names: tuple[str, ...]
    rate_rps: float
    instances: int

    @classmethod
    def of(cls, given: argparse.Namespace, instances: int, adapters: int, rate_rps: float) -> ClusterSetting:
        """Return the setting on the profile that ``benchmarks.pool_loop --stage profile`` has made."""
        profile = given.out / "profile.json"
        if not profile.exists():
            raise SystemExit(f"{profile} is missing: python -m benchmarks.pool_loop --stage profile makes it")
        names = tuple(f"a{number:02d}" for number in range(adapters))
        model = str(given.out / "small-llama" / "config.json")
        return cls(given.out / f"cluster-{instances}", model, profile, names, rate_rps, instances)

    @property
    def base_model(self) -> str:
        """Model of the profile."""
        return load_profile(str(self.profile)).model.hf_ids[0]

    @property
    def held(self) -> list[list[int]]:
        """Adapters of each instance at first: in turn."""
        return [list(range(i, len(self.names), self.instances)) for i in range(self.instances)]

    def workload(self, drift: Drift) -> Workload:
        """Return the workload of the first phase."""
        shares = drift.shares(0, self.held)
        adapters = [
            Adapter(name=name, rank=RANKS[number % len(RANKS)], rate_rps=float(self.rate_rps * share))
            for number, (name, share) in enumerate(zip(self.names, shares, strict=True))
        ]
        return Workload(
            base_model=self.base_model, prompt_tokens=PROMPT, output_tokens=OUTPUT, adapters=adapters
        )

    def make(self, drift: Drift, router: str) -> Path:
        """Write adapters, registry, workload and plan again; return the plan."""
        shutil.rmtree(self.top, ignore_errors=True)
        (self.top / "servers").mkdir(parents=True)
        make_adapters(self.top, self.names, self.base_model, self.model, RANKS)
        workload, plan = self.top / "workload.json", self.top / "plan.json"
        write_text_atomic(workload, json.dumps(self._document(self.workload(drift), router), indent=1))
        words = ("plan", str(workload), "--solver", "loraserve", "--quiet", "-o", str(plan))
        run_capplan(words, 1, (0,))
        return plan

    def _document(self, workload: Workload, router: str) -> dict[str, Any]:
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": MAX_MODEL_LEN}
        everywhere = {"router_options": {"holders": "all"}} if router != PLAN_ROUTER else {}
        return {
            "router": router,
            **everywhere,
            "version": 1,
            "base_model": self.base_model,
            "profile": str(self.profile.resolve()),
            "gpus": {"count": self.instances},
            "engine": limits,
            "requests": {
                "prompt_tokens": {"mean": PROMPT.mean, "std": PROMPT.std},
                "output_tokens": {"mean": OUTPUT.mean, "std": OUTPUT.std},
            },
            "adapters": [
                {"name": each.name, "rank": each.rank, "rate_rps": each.rate_rps}
                for each in workload.adapters
            ],
        }


@dataclass
class ServedDrift:
    """Outcome of a run."""

    requests: int
    failed: int
    ttft_s: Any
    placement: dict[str, Any]
    metrics: str
    top: Path
    core_busy: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Return the figures of the requests."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "TTFT p50, ms": round(1e3 * self.ttft_s.p50, 1),
            "TTFT p95, ms": round(1e3 * self.ttft_s.p95, 1),
            "TTFT p99, ms": round(1e3 * self.ttft_s.p99, 1),
            "cores busy, %": " / ".join(f"{each:.0f}" for each in self.core_busy),
        }

    def rounds(self) -> dict[str, Any]:
        """Return the figures of re-balancing."""
        found = self.placement["rebalancing"] or {}
        return {
            "rounds done": found.get("done", 0),
            "failed": found.get("failed", 0),
            "MB to copy": round(found.get("moved_bytes", 0) / 1e6, 2),
            "unpermuted": round(found.get("unpermuted_bytes", 0) / 1e6, 2),
            "transfers": self._sum("capplan:adapter_transfers_total{", 'outcome="done"'),
            "failed transfers": self._sum("capplan:adapter_transfers_total{", 'outcome="failed"'),
            "MB transferred": round(self._sum("capplan:adapter_transfer_bytes_total{") / 1e6, 2),
            "seconds": round(self._sum("capplan:adapter_transfer_seconds_total{"), 2),
            "copies removed": self._sum("capplan:adapter_copies_removed_total{"),
        }

    def _sum(self, start: str, part: str = "") -> float:
        lines = (line for line in self.metrics.splitlines() if line.startswith(start) and part in line)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def lost_adapters(self) -> list[str]:
        """Return the adapters that no server stores."""
        with AdapterRegistry(self.top / "registry.db") as registry:
            return [
                each.name
                for each in registry.adapters()
                if not any((self.top / "servers" / held / str(each.digest)).is_dir() for held in each.holders)
            ]


def serve_drift(
    setting: ClusterSetting,
    drift: Drift,
    rebalance_s: float | None = None,
    pinned: bool = False,
    router: str = PLAN_ROUTER,
) -> ServedDrift:
    """Serve the plan of the first phase under all phases.

    Parameters
    ----------
    rebalance_s
        Time between re-balancing; None: the plan's shares stay.
    pinned
        Pin each instance to a core.
    router
        A router that looks at the instances has all adapters on all of them.
    """
    plan = setting.make(drift, router)
    flags = {
        "--registry": setting.top / "registry.db",
        "--lora-root": setting.top / "servers",
        "--admin-api-key": ADMIN_KEY,
        "--num-kv-blocks": KV_BLOCKS,
        "--rules": "capplan",
        "--max-lora-rank": max(RANKS),
        "--rebalance": rebalance_s,
        "--forecast": None if rebalance_s is None else "last",
        "--workload": setting.top / "workload.json",
    }
    command = ServerCommand(setting.model, {}, (*flag_words(flags), str(plan)), 1)
    trace = drift.trace(setting.names, setting.rate_rps, setting.held)
    traced = setting.workload(drift).model_copy(update={"trace": trace})
    with running_server(command) as url, _pinning(setting.instances if pinned else 0):
        psutil.cpu_percent(percpu=True)
        result = bench(
            traced,
            Target(url, base_model=setting.base_model),
            LoadSettings(drift.duration_s - drift.warm_up_s, drift.warm_up_s, drain_s=_DRAIN_S),
            BenchOptions(seed=drift.seed, max_model_len=MAX_MODEL_LEN),
        )
        busy = psutil.cpu_percent(percpu=True)
        time.sleep(2 * _PINNED_EVERY_S)
        placement = json.loads(_get(f"{url}/v1/placement"))
        metrics = _get(f"{url}/metrics")
    overall = result.overall
    failed = overall.failed + overall.rejected
    return ServedDrift(overall.submitted, failed, overall.ttft_s, placement, metrics, setting.top, busy)


def _get(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextmanager
def _pinning(cores: int) -> Iterator[None]:
    """Pin the engine processes of served instances to one core each."""
    stop = threading.Event()

    def pin() -> None:
        while not stop.wait(_PINNED_EVERY_S):
            engines = [
                each
                for each in psutil.Process().children(recursive=True)
                if "capplan.fleet._launcher" in " ".join(each.cmdline())
            ]
            for number, each in enumerate(sorted(engines, key=lambda one: one.pid)):
                for process in (each, *each.children(recursive=True)):
                    process.cpu_affinity([number % cores])

    if cores:
        threading.Thread(target=pin, daemon=True).start()
    try:
        yield
    finally:
        stop.set()
