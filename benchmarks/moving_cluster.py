"""Cluster of small engines whose adapters move: real processes, a real router, and checks.

An intact copy of each adapter must be stored by a server at every moment, a request answered once with the
tokens of its adapter or refused with a reason, and the registry agree with the files. Used by
``benchmarks.running_cluster`` and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import torch
from safetensors.torch import save_file

from capplan import Plan
from capplan.engine.models import ModelConfig, model_config
from capplan.fleet import (
    InstanceSpec,
    LocalLauncher,
    RebalancingConfig,
    RegistrySettings,
    RouterConfig,
    ServingOptions,
    instances_of,
)
from capplan.fleet._app import RouterServer, RouterState
from capplan.fleet._fleet import InstanceFleet
from capplan.fleet._instance import RestartPolicy
from capplan.fleet._rebalancing import PostParams, RebalanceLoop
from capplan.registry import ADAPTER_FILES, AdapterRegistry, digest_of, read_adapter
from capplan.server import PoolSettings, ServerSettings, bind, url_of
from capplan.serving.rebalancing import AdapterDemand, Rebalancer
from capplan.spec import PlanAdapter, RebalanceSettings, Totals, Verification

MODEL: Final = "tiny-llama"
ADMIN_KEY: Final = "admin"
RANKS: Final = (4, 8, 16)
PROMPT: Final = (5, 6, 7, 8)
TOKENS: Final = 8
REASONS: Final = frozenset(
    {
        *("instance_failed", "aborted", "no_instance", "overloaded", "adapter_unavailable", "timeout"),
        *("registry_unavailable", "storage", "shutting_down", "adapter_changed"),
    }
)
"""Codes with which a request may be refused while instances and registry fail."""
EVENTS: Final = MappingProxyType({"rebalance": 6, "drift": 2, "kill": 1, "freeze": 1, "lock": 1, "damage": 2})
"""Events of a random schedule, and their weights."""
CLIENTS: Final = 6
CLIENT_RPS: Final = 20.0
"""Requests per second of a client, beyond their times."""
QUICK: Final = RestartPolicy(initial_delay_s=0.1, max_delay_s=0.5, max_restarts=50, abandon_after_s=5.0)


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Write a random adapter that changes the tokens of the model."""
    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=rng)
        tensors[f"{name}.lora_B.weight"] = torch.randn(config.query_size, rank, generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def make_adapters(
    top: Path, names: Sequence[str], base_model: str, model: str = MODEL, ranks: Sequence[int] = RANKS
) -> None:
    """Write adapters below a folder, and a registry that knows them; they have the ranks in turn."""
    config = model_config(model)
    with AdapterRegistry(top / "registry.db", create=True) as registry:
        for seed, name in enumerate(names):
            folder = top / "source" / name
            write_adapter(folder, config, ranks[seed % len(ranks)], seed)
            registry.add(read_adapter(name, folder, base_model))


def placed_at_first(names: Sequence[str], instances: int) -> list[dict[str, float]]:
    """Return the shares of a plan: adapters in turn, every third one on two instances."""
    held: list[dict[str, float]] = [{} for _ in range(instances)]
    for number, name in enumerate(names):
        shares = (0.5, 0.5) if number % 3 == 0 and instances > 1 else (1.0,)
        for copy, share in enumerate(shares):
            held[(number + copy) % instances][name] = share
    return held


def plan_of(held: Sequence[dict[str, float]], names: Sequence[str]) -> Plan:
    """Return a plan of one group per instance."""
    from tests.cli.examples import group, small_plan

    ranks = {name: RANKS[number % len(RANKS)] for number, name in enumerate(names)}
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    groups = []
    for number, shares in enumerate(held):
        made = group(f"g{number}", (("any", 4, 1.0, None),), **sizes)
        own = tuple(
            PlanAdapter(name=name, rank=ranks[name], rate_rps=1.0, share=share)
            for name, share in shares.items()
        )
        groups.append(made.replace(adapters=own))
    check = Verification(ok=True, seeds=(1,), duration_s=60.0, min_served_fraction=1.0)
    totals = Totals(gpus=len(held), lower_bound_gpus=1)
    return small_plan(groups=tuple(groups), totals=totals, verification=check)


@dataclass
class Outcomes:
    """Requests by what has become of them."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of requests."""
        return self.answered + sum(self.refused.values()) + len(self.wrong)


class MovingCluster:
    """A router with its instances below a folder, in which it may be started again.

    Attributes
    ----------
    names
        Of the adapters.
    right
        Tokens of each adapter.
    outcomes
        Of all requests.
    """

    def __init__(self, top: Path, plan: Plan, names: Sequence[str], period_s: float = 3600.0) -> None:
        self.top = top
        self.plan = plan
        self.names = tuple(names)
        self.right: dict[str, list[int]] = {}
        self.outcomes = Outcomes()
        self.log: list[str] = []
        self._settings = RebalanceSettings(every_s=period_s, forecast="last")
        self._registry = AdapterRegistry(top / "registry.db", timeout_s=10.0)
        self._digests = {name: str(self._registry.get(name).digest) for name in names}

    def config(self) -> RouterConfig:
        """Return the configuration of router and instances."""
        root = self.top / "servers"
        root.mkdir(exist_ok=True)
        serving = ServingOptions(
            MODEL,
            self.plan.base_model,
            engine={"rules": "capplan", "max_lora_rank": max(RANKS)},
            pool=PoolSettings(str(self.top / "registry.db")),
            lora_root=root,
            admin_api_key=ADMIN_KEY,
        )
        specs = instances_of(self.plan, serving)
        adapters = [self._registry.get(name) for name in self.names]
        demands = [AdapterDemand(each.name, each.rank, 1.0, each.size_bytes or 0) for each in adapters]
        points = {rank: 1000.0 / (1.0 + 0.05 * rank) for rank in RANKS}
        moving = RebalancingConfig(
            Rebalancer(demands, len(specs), points, self._settings),
            ADMIN_KEY,
            prior_output_tokens=TOKENS,
            posts=PostParams(timeout_s=2.0, attempts=2, retry_s=0.2),
        )
        location = str(self.top / "registry.db")
        registry = RegistrySettings(location, self.plan.base_model, timeout_s=0.5)
        server = ServerSettings(self.plan.base_model, drain_timeout_s=5.0)
        return RouterConfig(
            specs,
            LocalLauncher(len(specs)),
            server,
            QUICK,
            log=self.log.append,
            registry=registry,
            rebalancing=moving,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start router and instances; stop them at the end."""
        config = self.config()
        self.fleet = InstanceFleet(config)
        is_ready = asyncio.Event()
        with bind("127.0.0.1", 0) as listener:
            server = RouterServer(RouterState(config.server, self.fleet), is_ready.set)
            serving = asyncio.ensure_future(server.serve([listener]))
            waiting = asyncio.ensure_future(is_ready.wait())
            await asyncio.wait((serving, waiting), return_when="FIRST_COMPLETED")
            waiting.cancel()
            if serving.done():
                serving.result()
            async with aiohttp.ClientSession(url_of(listener)) as self.client:
                yield
            if not serving.done():
                server.end()
            await serving

    @property
    def loop(self) -> RebalanceLoop:
        """Re-balancing of the router."""
        assert self.fleet.rebalancing is not None
        return self.fleet.rebalancing

    @property
    def specs(self) -> list[InstanceSpec]:
        """Configurations of the instances."""
        return [each.spec for each in self.fleet.instances]

    async def learn(self) -> None:
        """Note the tokens of each adapter, which fetches it from its location."""
        for name in self.names:
            status, body = await self.post(name)
            assert status == 200, body
            self.right[name] = json.loads(body)["choices"][0]["token_ids"]
        assert len({tuple(tokens) for tokens in self.right.values()}) == len(self.names)

    def lose_sources(self) -> None:
        """Delete the locations of all adapters: the servers have the only copies."""
        shutil.rmtree(self.top / "source")

    async def post(self, name: str, **fields: Any) -> tuple[int, bytes]:
        """Return status and body of a request."""
        body = {
            "model": name,
            "prompt": list(PROMPT),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        async with self.client.post("/v1/completions", json=body) as response:
            return response.status, await response.read()

    async def ask(self, name: str, stream: bool = False) -> None:
        """Send a request and note its outcome: it is answered once and rightly, or refused with a reason."""
        status, body = await self.post(name, stream=stream)
        tokens, code = _tokens_and_error(body, stream=stream and status == 200)
        if code is not None:
            if (status == 503 or (stream and status == 200)) and code in REASONS:
                self.outcomes.refused[code] += 1
            else:
                self.outcomes.wrong.append(f"{name}: {status} {code}")
        elif tokens == self.right[name]:
            self.outcomes.answered += 1
        else:
            self.outcomes.wrong.append(f"{name}: {tokens} instead of {self.right[name]}")

    def stored(self) -> dict[str, set[str]]:
        """Return the servers that have the files of each adapter, with all their bytes right."""
        root = self.top / "servers"
        found: dict[str, set[str]] = {name: set() for name in self.names}
        for server in root.iterdir():
            for name, digest in self._digests.items():
                if is_intact(server / digest):
                    found[name].add(server.name)
        return found

    def damage(self, rng: random.Random) -> bool:
        """Change a byte of a copy; return whether there was one that may break.

        Another server must have a share of the adapter and an intact copy: one without a share may just be
        removing its copy, after it has seen this one intact.
        """
        shares, _ = self.fleet.router.shares()
        holders = {each.name: set(each.holders) for each in self._registry.adapters()}
        serving = {
            name: {spec.name for spec, own in zip(self.specs, shares, strict=True) if own.get(name)}
            for name in self.names
        }
        copies = [
            (name, server)
            for name, there in self.stored().items()
            for server in sorted(there)
            if (there & holders[name] & serving[name]) - {server}
        ]
        if not copies:
            return False
        name, server = rng.choice(copies)
        file = self.top / "servers" / server / self._digests[name] / "adapter_model.safetensors"
        with contextlib.suppress(FileNotFoundError), file.open("r+b") as opened:  # it may be leaving
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last[0] ^ 1]))
        return True

    def check_stored(self) -> None:
        """Check that every adapter is stored by a server that the registry has among its holders."""
        lost = set(self.names)
        for _ in range(3):  # between the two reads another server may have become the only holder
            holders = {each.name: set(each.holders) for each in self._registry.adapters()}
            stored = self.stored()
            lost = {name for name in lost if not stored[name] & holders[name]}
            if not lost:
                return
        raise AssertionError(f"no server stores {sorted(lost)}")

    def process_of(self, index: int) -> int | None:
        """Return the process id of an instance; None if it does not run."""
        handle = self.fleet.instances[index]._handle
        process = getattr(handle, "_process", None)
        return None if process is None or process.returncode is not None else int(process.pid)

    def kill(self, index: int) -> bool:
        """Kill an instance; return whether it was running."""
        pid = self.process_of(index)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    async def freeze(self, index: int, time_s: float) -> None:
        """Stop an instance for a time: its transfers stall."""
        pid = self.process_of(index)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(time_s)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def lock_registry(self, time_s: float) -> None:
        """Hold the registry's lock for a time."""
        other = sqlite3.connect(self.top / "registry.db")
        with contextlib.closing(other), contextlib.suppress(sqlite3.OperationalError):
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(time_s)

    async def until_up(self, timeout_s: float = 60.0) -> None:
        """Wait until all instances accept requests."""
        async with asyncio.timeout(timeout_s):
            while not all(each.is_up for each in self.fleet.instances):
                await asyncio.sleep(0.05)


def is_intact(copy: Path) -> bool:
    """Return whether a folder holds the files of the adapter that it is named by."""
    if any((copy / name).is_symlink() for name in ADAPTER_FILES):
        return False
    try:
        hashes = {name: hashlib.sha256((copy / name).read_bytes()).hexdigest() for name in ADAPTER_FILES}
    except OSError:
        return False
    return digest_of(hashes) == copy.name


def _tokens_and_error(body: bytes, stream: bool) -> tuple[list[int], str | None]:
    """Return the tokens of a response, and the code of its error."""
    parts = body.split(b"\n\n") if stream else [body]
    tokens: list[int] = []
    complete = not stream
    for part in parts:
        data = part.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            complete = True
        elif data:
            document = json.loads(data)
            if "error" in document:
                return tokens, str(document["error"].get("code"))
            for choice in document.get("choices", ()):
                tokens += choice.get("token_ids") or []
    return tokens, None if complete else "aborted"


class RandomSchedule:
    """Random requests, re-balancing, crashes, stalls and locks, all from one seed.

    Attributes
    ----------
    events
        What has happened, by kind.
    """

    def __init__(self, cluster: MovingCluster, seed: int, duration_s: float) -> None:
        self.events: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._duration_s = duration_s
        self._weights = [self._rng.paretovariate(1.0) for _ in cluster.names]
        self._asked = 0

    async def run(self) -> None:
        """Run the schedule.

        Raises
        ------
        AssertionError
            If an adapter is stored nowhere, or a request is lost, or answered wrongly or twice.
        """
        outcomes = self._cluster.outcomes
        before, self._end_s = outcomes.total, asyncio.get_running_loop().time() + self._duration_s
        await asyncio.gather(self._watch(), self._disturb(), *(self._client() for _ in range(CLIENTS)))
        assert outcomes.total - before == self._asked, "a request is lost"
        assert not outcomes.wrong, outcomes.wrong[:5]

    def _goes_on(self) -> bool:
        return asyncio.get_running_loop().time() < self._end_s

    async def _client(self) -> None:
        while self._goes_on():
            [name] = self._rng.choices(self._cluster.names, self._weights)
            self._asked += 1
            await self._cluster.ask(name, stream=self._rng.random() < 0.5)
            await asyncio.sleep(self._rng.expovariate(CLIENT_RPS))

    async def _watch(self) -> None:
        while self._goes_on():
            await asyncio.to_thread(self._cluster.check_stored)
            await asyncio.sleep(0.1)

    async def _disturb(self) -> None:
        number = max(4, int(1.5 * self._duration_s))
        for kind in self._rng.choices(list(EVENTS), list(EVENTS.values()), k=number):
            await asyncio.sleep(self._rng.uniform(0.0, 2.0 * self._duration_s / number))
            if not self._goes_on():
                return
            self.events[await self._happen(kind)] += 1

    async def _happen(self, kind: str) -> str:
        """Let an event happen and return its name."""
        cluster, rng = self._cluster, self._rng
        index = rng.randrange(len(cluster.fleet.instances))
        if kind == "rebalance":
            made = await cluster.loop.rebalance()
            return kind if made.reason is None else "failed rebalance"
        if kind == "drift":
            rng.shuffle(self._weights)
        elif kind == "kill":
            return kind if cluster.kill(index) else "kill of an instance that is down"
        elif kind == "freeze":
            await cluster.freeze(index, rng.uniform(0.2, 2.0))
        elif kind == "damage":
            return kind if cluster.damage(rng) else "damage without a choice"
        else:
            await cluster.lock_registry(rng.uniform(0.1, 1.5))
        return kind
