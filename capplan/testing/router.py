"""What every router has to keep: subclass `RouterContract` and give it a fixture `make_router`.

The fixture returns a function without arguments that makes a new router: a name, the parameters of one of
ours, or a function of a request and its candidates (`capplan.twin.cluster.PythonRouter`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from capplan.datasets import load_profile
from capplan.spec import Adapter, Lengths, Workload
from capplan.twin.cluster import ClusterResult, Instance, PythonRouter, simulate_cluster
from capplan.twin.cluster.rules import NamedRouter
from capplan.twin.request_table import FINISHED

MakeRouter: TypeAlias = Callable[[], NamedRouter | PythonRouter]

_SECONDS = 20.0


def example_cluster(
    *, adapters: int = 9, instances: int = 3, total_rps: float = 6.0, apart: bool = False
) -> tuple[Workload, list[Instance]]:
    """Return a small workload of three ranks, and instances that hold all of it, or each a part."""
    profile = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(
            Adapter(name=f"a{i}", rank=(8, 16, 64)[i % 3], rate_rps=total_rps / adapters)
            for i in range(adapters)
        ),
        prompt_tokens=Lengths(mean=200, std=150),
        output_tokens=Lengths(mean=60, std=50),
    )
    held = [
        {a.name: 1.0 for n, a in enumerate(workload.adapters) if n % instances == i} if apart else None
        for i in range(instances)
    ]
    return workload, [Instance(profile, a_max=4, s_max=64, adapters=own) for own in held]


class RouterContract:
    """The contract; what a router is good at is for its own tests."""

    def _run(self, make_router: MakeRouter, seed: int = 0, **shape: object) -> ClusterResult:
        workload, instances = example_cluster(**shape)  # type: ignore[arg-type]
        return simulate_cluster(workload, instances, router=make_router(), duration_s=_SECONDS, seed=seed)

    def test_every_request_goes_to_one_instance(self, make_router: MakeRouter) -> None:
        """Nothing is lost, nothing is counted twice."""
        result = self._run(make_router)
        assert sum(result.requests_per_instance) == result.submitted > 0
        assert int((result.requests.status == FINISHED).sum()) == result.completed

    def test_requests_go_to_holders_only(self, make_router: MakeRouter) -> None:
        """An instance that does not hold the adapter cannot serve it."""
        result = self._run(make_router, apart=True)
        adapter, instance = result.requests.adapter, result.requests.instance
        assert np.array_equal(instance, (adapter - 1) % len(result.instances))

    def test_a_single_instance_gets_everything(self, make_router: MakeRouter) -> None:
        """There is nobody else."""
        result = self._run(make_router, instances=1)
        assert result.requests_per_instance == (result.submitted,)

    def test_the_same_seed_gives_the_same_decisions(self, make_router: MakeRouter) -> None:
        """Simulations are reproducible; a router draws from the request's own number only."""
        one, other = (self._run(make_router, seed=7) for _ in range(2))
        assert np.array_equal(one.requests.instance, other.requests.instance)

    def test_idle_instances_serve_all_there_is(self, make_router: MakeRouter) -> None:
        """At a trickle of requests no way of routing leaves any behind."""
        result = self._run(make_router, total_rps=0.5)
        assert result.served_fraction == 1.0
