"""Re-balancing of a running cluster: demand, placement, shares at the instances, routing table.

One round closes a window of demand, reads from the registry which adapters there are and which instances
store them, and asks the `Rebalancer` for the shares of the next window. The instances get their new shares
before the router routes by them; the first request of an adapter at a new instance makes it fetch the
adapter. Requests that have been sent keep their instance. Then the former holders get a share of zero, by
which they remove their copies when these are idle and another one is registered. A round that fails leaves
the placement in force as it is. All that a round needs is in the registry and the instances, so that a
router that ends in the middle leaves nothing to repair but copies, which the next one has removed.

Shares of the placement in force are posted to the instances until each has acknowledged them. Demand is the
tokens of the requests of an adapter that arrived in a window (LoRAServe, section IV-A).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import aiohttp

from capplan.errors import InputError
from capplan.fleet._instance import FileLimitError, InstanceClient, InstanceSupervisor
from capplan.fleet._registered_adapters import RegisteredAdapters, RegistrySnapshot
from capplan.fleet._routing import InstanceRouter, RoutingTable
from capplan.serving.rebalancing import AdapterDemand, Rebalanced, Rebalancer

_USAGE: Final = re.compile(
    rb'"usage":\s*\{[^{}]*?"prompt_tokens":\s*(\d{1,9})\b[^{}]*?"completion_tokens":\s*(\d{1,9})\b'
)
_END_OF_EVENT: Final = b"\n\n"
_LAST_EVENT: Final = b"data: [DONE]\n\n"
_TAIL_BYTES: Final = 4096
"""Of a whole response: token counts are at its end."""
_MEMORY: Final = 0.5
"""Weight of the answers of earlier windows in the mean output, per window."""


class DemandWindow(NamedTuple):
    """Demand of a window: tokens per second and number of the requests that arrived in it, by adapter.

    None is the base model. `unfinished` requests had no complete answer at the end.
    """

    tok_s: dict[str | None, float]
    duration_s: float
    requests: dict[str | None, int]
    unfinished: int


class CountedRequest:
    """A request that has arrived, and its tokens so far."""

    __slots__ = ("_meter", "adapter", "output_tokens", "prompt_tokens")

    def __init__(self, meter: DemandMeter, adapter: str | None, prompt_tokens: int) -> None:
        self._meter = meter
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0

    def stream(self, events: bytes) -> None:
        """Count whole events of a stream, one token each, or take the counts that it ends with."""
        self.output_tokens += events.count(_END_OF_EVENT) - events.endswith(_LAST_EVENT)
        self._take_usage(events)

    def answer(self, body: bytes) -> None:
        """Take the counts of a whole response."""
        self._take_usage(body[-_TAIL_BYTES:])

    def _take_usage(self, text: bytes) -> None:
        if found := _USAGE.search(text):
            self.prompt_tokens, self.output_tokens = map(int, found.groups())

    def finish(self) -> None:
        """End the request, whose answer is complete."""
        self._meter.finish(self)

    def drop(self) -> None:
        """Do not count the request: it is invalid."""
        self._meter.drop(self)


class DemandMeter:
    """Tokens of the requests that arrive, by adapter and window.

    Tokens of requests that are refused, or fail, count as well: served tokens would hide an overload. A
    request without a complete answer at the end of its window counts with the mean output, or with the tokens
    that it has, if there are more. `prior_output_tokens` is the mean assumed before any answer; it counts as
    one answer of each window. `adapters`, of which None is the base model, are those of the next window that
    is closed; requests of others are not in it.
    """

    def __init__(self, adapters: Iterable[str | None], prior_output_tokens: float) -> None:
        self.adapters = tuple(adapters)
        self._prior_output_tokens = prior_output_tokens
        self._answers = self._answer_tokens = 0.0
        self._open: dict[CountedRequest, None] = {}
        self._tokens: dict[str | None, float] = {}
        self._requests: Counter[str | None] = Counter()
        self._begin_s = time.monotonic()

    @property
    def mean_output_tokens(self) -> float:
        """Mean output tokens of the complete answers, recent windows with more weight."""
        return (self._prior_output_tokens + self._answer_tokens) / (1.0 + self._answers)

    def arrive(self, adapter: str | None, prompt_tokens: int) -> CountedRequest:
        """Count a request of the current window; its prompt is an estimate until the response counts it."""
        request = CountedRequest(self, adapter, prompt_tokens)
        self._open[request] = None
        self._requests[adapter] += 1
        return request

    def finish(self, request: CountedRequest) -> None:
        """Count a complete answer; requests of former windows have been counted."""
        self._answers += 1.0
        self._answer_tokens += request.output_tokens
        if request in self._open:
            del self._open[request]
            self._add(request, request.output_tokens)

    def drop(self, request: CountedRequest) -> None:
        """Do not count a request of the current window."""
        if request in self._open:
            del self._open[request]
            self._requests[request.adapter] -= 1

    def _add(self, request: CountedRequest, output_tokens: float) -> None:
        tokens = request.prompt_tokens + output_tokens
        self._tokens[request.adapter] = self._tokens.get(request.adapter, 0.0) + tokens

    def close_window(self, now_s: float | None = None) -> DemandWindow:
        """Return the demand of the current window, and begin the next one."""
        end_s = time.monotonic() if now_s is None else now_s
        for request in self._open:
            self._add(request, max(self.mean_output_tokens, request.output_tokens))
        duration_s = max(end_s - self._begin_s, 1e-9)
        tok_s = {name: self._tokens.get(name, 0.0) / duration_s for name in self.adapters}
        requests = {name: self._requests[name] for name in self.adapters}
        window = DemandWindow(tok_s, duration_s, requests, len(self._open))
        self._open, self._tokens, self._requests, self._begin_s = {}, {}, Counter(), end_s
        self._answers, self._answer_tokens = self._answers * _MEMORY, self._answer_tokens * _MEMORY
        return window


_PATH: Final = "/v1/adapter_shares"
_BATCH: Final = 2000
"""Adapters of one post; their names have at most 256 characters, a body at least 1 MiB."""


@dataclass(frozen=True)
class PostParams:
    """Posts of shares."""

    timeout_s: float = 5.0
    """Time for the acknowledgement of a post."""
    attempts: int = 3
    """Posts of new shares to an instance after which a re-balancing is given up."""
    retry_s: float = 1.0
    """Time between attempts."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "attempts", "retry_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError("must be a finite number > 0", getattr(self, name), name)


class _Told:
    """Shares that a process has acknowledged; those that are not listed are 0, or not known to it yet.

    `unknown` are the adapters that it has been told nothing of; None: all.
    """

    def __init__(self, client: InstanceClient | None) -> None:
        self.client = client
        self.shares: dict[str, float] = {}
        self.unknown: set[str] | None = None


class ShareUpdates:
    """Posts shares to instances and repeats what fails; an instance that has restarted gets all again.

    `in_force` has the shares of every instance in the placement in force; those of other adapters are 0.
    `failures` is the number of posts that failed.
    """

    def __init__(
        self,
        instances: Sequence[InstanceSupervisor],
        adapters: Iterable[str],
        admin_key: str,
        params: PostParams = PostParams(),
    ) -> None:
        self.in_force: Sequence[Mapping[str, float]] = [{} for _ in instances]
        self.failures = 0
        self._instances = instances
        self._adapters = frozenset(adapters)
        self._key = admin_key
        self._params = params
        self._told = [_Told(None) for _ in instances]
        self._lock = asyncio.Lock()

    def set_adapters(self, adapters: Iterable[str]) -> None:
        """Change the adapters that have shares; those that are no longer among them have none."""
        before, self._adapters = self._adapters, frozenset(adapters)
        for told in self._told:
            if told.unknown is not None:
                told.unknown = (told.unknown | (self._adapters - before)) & self._adapters

    async def announce(self, shares: Sequence[Mapping[str, float]], indexes: Iterable[int]) -> list[int]:
        """Post shares before requests follow them; return the instances that did not acknowledge."""
        async with self._lock:
            chosen = list(indexes)
            told = await asyncio.gather(*(self._announce(i, shares[i]) for i in chosen))
            return [i for i, is_told in zip(chosen, told, strict=True) if not is_told]

    async def _announce(self, index: int, shares: Mapping[str, float]) -> bool:
        for attempt in range(self._params.attempts):
            if attempt:
                await asyncio.sleep(self._params.retry_s)
            if (told := self._told_of(index)) is not None:
                gains = {name: share for name, share in shares.items() if told.shares.get(name) != share}
                if await self._post(told, gains):
                    return True
        return False

    async def run(self) -> None:
        """Post the shares in force to every instance that does not have them."""
        while True:
            await self.update()
            await asyncio.sleep(self._params.retry_s)

    async def update(self) -> bool:
        """Post the shares in force once; return whether all instances that are up have them."""
        async with self._lock:
            up = [i for i, each in enumerate(self._instances) if each.is_up]
            return all(await asyncio.gather(*(self._update(i) for i in up)))

    async def _update(self, index: int) -> bool:
        told = self._told_of(index)
        if told is None:
            return False
        positive = {name: share for name, share in self.in_force[index].items() if share > 0.0}
        new = {name: share for name, share in positive.items() if told.shares.get(name) != share}
        adapters, unknown = self._adapters, told.unknown
        others = {*told.shares, *(adapters if unknown is None else unknown)}
        new |= {name: 0.0 for name in others if name not in positive}
        if await self._post(told, new):
            known = adapters if unknown is None else unknown
            told.unknown = set((self._adapters if told.unknown is None else told.unknown) - known)
        return told.shares == positive

    def _told_of(self, index: int) -> _Told | None:
        """Return what the process of an instance knows; None if there is none."""
        client = self._instances[index].client
        if client is not None and self._told[index].client is not client:
            self._told[index] = _Told(client)  # another process, which has no shares
        return None if client is None else self._told[index]

    async def _post(self, told: _Told, shares: Mapping[str, float]) -> bool:
        """Post shares; return whether all of them are acknowledged."""
        client, new = told.client, list(shares.items())
        if client is None:
            return False
        for first in range(0, len(new), _BATCH):
            part = dict(new[first : first + _BATCH])
            body = json.dumps({"shares": part}).encode()
            try:
                await client.post_as(self._key, _PATH, body, self._params.timeout_s)
            except (aiohttp.ClientError, FileLimitError, TimeoutError):
                self.failures += 1
                return False
            for name, share in part.items():
                if share > 0.0:
                    told.shares[name] = share
                else:
                    told.shares.pop(name, None)
        return True


Trigger = Literal["period", "instances", "retry"]

_BECAUSE: Final[Mapping[str, str]] = MappingProxyType(
    {"instances": "instances are down or back", "retry": "the last one has failed"}
)
_MB: Final = 1e6
_WATCH_S: Final = 0.2
_MAX_REFUSED: Final = 10_000
"""Pairs of instance and adapter; the oldest ones are forgotten first."""
_FORGOTTEN_AFTER: Final = 3
"""Periods after which an instance is tried again for an adapter that it could not store."""


@dataclass(frozen=True)
class RebalancingConfig:
    """Re-balancing of a running cluster.

    Attributes
    ----------
    rebalancer
        Returns the shares of the next window; its servers are the instances in their order.
    admin_key
        Admin key of the instances.
    balances_base
        Whether the base model is one of the rebalancer's adapters, by its name in the registry.
    prior_output_tokens
        Mean output tokens assumed before any answer.
    posts
        Posts of shares to the instances.
    settle_s
        Time for which an instance must be down, or back, before a round of its own.
    retry_s
        Time between a round that has failed and the next one.
    """

    rebalancer: Rebalancer
    admin_key: str
    balances_base: bool = False
    prior_output_tokens: float = 128.0
    posts: PostParams = field(default_factory=PostParams)
    settle_s: float = 5.0
    retry_s: float = 10.0


@dataclass(frozen=True)
class Round:
    """Outcome of a round."""

    number: int
    """From 1."""
    trigger: Trigger
    """``period``, ``instances`` (some are down or back), or ``retry`` (the last round has failed).

    Only the first closes a window, the others use the forecast in force.
    """
    at_s: float
    """Time of its end, in seconds since 1970."""
    reason: str | None = None
    """Why it failed; None: its placement is in force."""
    window_s: float = 0.0
    """Length of the window of demand, in which `requests` and `arrived_tok_s` arrived; 0 if it goes on."""
    requests: int = 0
    arrived_tok_s: float = 0.0
    target: float | None = None
    """Mean utilization of the instances that are up if the forecast demand were spread evenly; above 1 they
    are overloaded."""
    moved_bytes: int = 0
    """Bytes of adapters that instances do not store yet."""
    unpermuted_bytes: int = 0
    """The same if servers had not been permuted."""
    gained: int = 0
    """Pairs of adapter and instance that are new in the placement; `lost` are no longer in it."""
    lost: int = 0
    unavailable: tuple[str, ...] = ()
    """Instances that were not up."""
    duration_s: float = 0.0


class RoundFailedError(Exception):
    """A round cannot put a placement in force; the message says why."""


class RefusedAdapters:
    """Pairs of an instance and an adapter that it could not store lately, which rounds place elsewhere.

    The router sends a request that an instance refuses to another one, and would do so for each further one
    as long as the instance has a share of the adapter. Without a share no request tells whether the reason
    still stands, so that refusals are forgotten after a time.
    """

    def __init__(self, instances: int, forget_s: float) -> None:
        self._instances = instances
        self._forget_s = forget_s
        self._refused_s: OrderedDict[tuple[int, str], float] = OrderedDict()

    def note(self, instance: int, adapter: str, now_s: float | None = None) -> None:
        """Note a refusal; times are on the monotonic clock, None: now."""
        pair = instance, adapter
        self._refused_s[pair] = time.monotonic() if now_s is None else now_s
        self._refused_s.move_to_end(pair)
        if len(self._refused_s) > _MAX_REFUSED:
            self._refused_s.popitem(last=False)

    def current(self, now_s: float | None = None) -> list[set[str]]:
        """Return the adapters that each instance has refused and that are not forgotten yet."""
        now_s = time.monotonic() if now_s is None else now_s
        refused: list[set[str]] = [set() for _ in range(self._instances)]
        for (instance, adapter), at_s in list(self._refused_s.items()):
            if now_s - at_s >= self._forget_s:
                del self._refused_s[instance, adapter]
            else:
                refused[instance].add(adapter)
        return refused


class RebalanceLoop:
    """Re-balances a cluster every `every_s` of its settings; it belongs to the event loop.

    The proxy counts the tokens of requests in `demand`, and notes in `refused` what instances could not
    store. `done` and `failed` are numbers of rounds, `moved_bytes` and `unpermuted_bytes` sums over them;
    `target` is of the last round that has one.
    """

    def __init__(
        self,
        config: RebalancingConfig,
        registered: RegisteredAdapters,
        instances: Sequence[InstanceSupervisor],
        router: InstanceRouter,
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._base_model = registered.settings.base_model
        self._registered = registered
        self._instances = instances
        self._router = router
        self._log = log
        self.demand = DemandMeter(router.adapters, config.prior_output_tokens)
        self.updates = ShareUpdates(instances, router.ranks, config.admin_key, config.posts)
        self.updates.in_force = router.shares()[0]
        registered.on_change = self._on_adapters
        self.refused = RefusedAdapters(len(instances), _FORGOTTEN_AFTER * self.every_s)
        self.last: Round | None = None
        self.done = self.failed = 0
        self.moved_bytes = self.unpermuted_bytes = 0
        self.target: float | None = None
        self._placed_on = self._up = tuple(range(len(instances)))
        self._up_since_s = self._ended_s = time.monotonic()

    def _on_adapters(self) -> None:
        """Measure the demand of the adapters in force, and tell the instances their shares."""
        self.demand.adapters = tuple(self._router.adapters)
        self.updates.set_adapters(self._router.ranks)
        self.updates.in_force = self._router.shares()[0]

    @property
    def every_s(self) -> float:
        return self._config.rebalancer.settings.every_s

    async def run(self) -> None:
        """Re-balance until cancelled."""
        updating = asyncio.ensure_future(self.updates.run())
        self.demand.close_window()  # the start of the instances is not part of the first window
        due_s = time.monotonic() + self.every_s
        try:
            while True:
                await asyncio.wait((updating,), timeout=max(0.0, min(_WATCH_S, due_s - time.monotonic())))
                if updating.done():
                    updating.result()
                trigger = self._repair()
                if time.monotonic() >= due_s:
                    trigger, due_s = "period", max(due_s + self.every_s, time.monotonic())
                if trigger is not None:
                    await self.rebalance(trigger)
        finally:
            updating.cancel()
            await asyncio.wait((updating,))

    def _repair(self) -> Trigger | None:
        """Return why a round is due before the period has passed; None: it is not."""
        now_s, up = time.monotonic(), self._instances_up()
        if up != self._up:
            self._up, self._up_since_s = up, now_s
        if self.last is not None and self.last.reason is not None:
            return "retry" if now_s - self._ended_s >= self._config.retry_s else None
        is_settled = now_s - self._up_since_s >= self._config.settle_s
        return "instances" if up and up != self._placed_on and is_settled else None

    def _instances_up(self) -> tuple[int, ...]:
        return tuple(i for i, each in enumerate(self._instances) if each.is_up)

    async def rebalance(self, trigger: Trigger = "period") -> Round:
        """Run one round, after those that run."""
        async with self._registered.changing:
            return await self._rebalance(trigger)

    async def _rebalance(self, trigger: Trigger) -> Round:
        begin_s = time.monotonic()
        down = tuple(each.spec.name for each in self._instances if not each.is_up)
        number = self.done + self.failed + 1
        facts: dict[str, Any] = {"number": number, "trigger": trigger, "unavailable": down}
        try:
            await self._place(facts)
        except (RoundFailedError, InputError) as error:
            self.failed += 1
            facts["reason"] = str(error)
        except Exception as error:  # noqa: BLE001 - a defect; the placement in force serves on
            self.failed += 1
            facts["reason"] = f"{type(error).__name__}: {error}"
            self._log(traceback.format_exc().rstrip())
        else:
            self.done += 1
            self.target = facts["target"]
            self.moved_bytes += facts["moved_bytes"]
            self.unpermuted_bytes += facts["unpermuted_bytes"]
        self._ended_s = time.monotonic()
        self.last = Round(at_s=time.time(), duration_s=self._ended_s - begin_s, **facts)
        self._report(self.last)
        return self.last

    async def _place(self, facts: dict[str, Any]) -> None:
        """Put a new placement in force, and add the facts of the round.

        If there is none, raise `RoundFailedError` or `InputError`; the placement in force stays.
        """
        up = self._instances_up()
        if not up:
            raise RoundFailedError("no instance is up")
        snapshot = await self._registered.take_in()
        before, base = self._router.shares()
        tok_s, requests = self._arrived(facts) if facts["trigger"] == "period" else (None, None)
        refused = self.refused.current()

        def step() -> tuple[Rebalanced, RoutingTable]:
            rebalancer, shares = self._config.rebalancer, self._with_base(before, base)
            rebalancer.replace_adapters(self._demands(snapshot))
            made = rebalancer.step(tok_s, snapshot.stored, shares, up, requests, refused)
            return made, self._table(made)

        result, table = await self._registered.in_thread(step)
        shares, _ = table.shares()
        if missing := await self.updates.announce(shares, up):
            names = ", ".join(self._instances[i].spec.name for i in missing)
            raise RoundFailedError(f"{names}: the new shares are not acknowledged")
        self._router.swap(table)
        self.updates.in_force = shares
        self._placed_on = up
        facts |= {
            "target": result.target,
            "moved_bytes": result.moved_bytes,
            "unpermuted_bytes": result.unpermuted_bytes,
            "gained": _number_of_new(shares, before),
            "lost": _number_of_new(before, shares),
        }

    def _arrived(self, facts: dict[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        """Close the window of demand; return its tokens per second and requests by the rebalancer's names."""
        window = self.demand.close_window()
        facts |= {
            "window_s": window.duration_s,
            "requests": sum(window.requests.values()),
            "arrived_tok_s": sum(window.tok_s.values()),
        }
        names: dict[str, str | None] = {name: name for name in window.tok_s if name is not None}
        if self._config.balances_base:
            names[self._base_model] = None
        return (
            {name: window.tok_s[key] for name, key in names.items()},
            {name: window.requests[key] for name, key in names.items()},
        )

    def _with_base(
        self, shares: Sequence[Mapping[str, float]], base: Sequence[float]
    ) -> list[dict[str, float]]:
        """Return shares with those of the base model, as the rebalancer has them."""
        if not self._config.balances_base:
            return [dict(own) for own in shares]
        pairs = zip(shares, base, strict=True)
        return [{**own, self._base_model: share} for own, share in pairs]

    def _table(self, result: Rebalanced) -> RoutingTable:
        """Return the routing table of new shares."""
        name = self._base_model
        held = [{each: share for each, share in own.items() if each != name} for own in result.shares]
        base = [own.get(name, 0.0) for own in result.shares]
        return self._router.table(held, base if any(base) else None)

    def _demands(self, snapshot: RegistrySnapshot) -> list[AdapterDemand]:
        """Return the adapters to place: those of the registry, new ones without declared demand."""
        known = {each.name: each for each in self._config.rebalancer.adapters}
        demands = [known[self._base_model]] if self._config.balances_base else []
        for name, rank in snapshot.ranks.items():
            own = known.get(name) or AdapterDemand(name, rank, 0.0)
            size_bytes = snapshot.size_bytes.get(name, own.size_bytes)
            demands.append(replace(own, rank=rank, size_bytes=size_bytes))
        return demands

    def _report(self, made: Round) -> None:
        if made.reason is not None:
            self._log(f"re-balancing {made.number} failed, the placement in force stays: {made.reason}")
            return
        because = _BECAUSE.get(made.trigger, f"{made.requests} requests in {made.window_s:.0f} s")
        copied = f"{made.moved_bytes / _MB:.1f} MB to copy ({made.unpermuted_bytes / _MB:.1f} MB unpermuted)"
        self._log(
            f"re-balancing {made.number}: {because}, {made.gained} adapters at new instances, "
            f"{copied}, {made.duration_s:.2f} s"
        )
        if made.target is not None and made.target > 1.0:
            up = len(self._instances) - len(made.unavailable)
            self._log(
                f"overload: the expected demand is {made.target:.2f} of what {up} instances sustain; "
                "add instances"
            )


def _number_of_new(new: Sequence[Mapping[str, float]], old: Sequence[Mapping[str, float]]) -> int:
    """Return the number of pairs of adapter and instance that only `new` has."""
    return sum(len(a.keys() - b.keys()) for a, b in zip(new, old, strict=True))
