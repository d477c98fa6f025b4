"""Choice of the instance of a request, by the rules of the cluster twin and the states of instances."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from capplan.serving.routers import Placement
from capplan.serving.routers import smooth_shares as shares_rule
from capplan.serving.routers.choose import ASK_RANKS, RoutingRule, note, route
from capplan.serving.routers.fleet import NEVER_SEEN, ArrivingRequest, Fleet, new_fleet
from capplan.spec.routing import STATE_PERIOD_S

# The plain Python function: a decision takes microseconds, and nothing is compiled before the first request.
_by_credit: Final[Callable[..., int]] = getattr(shares_rule.by_credit, "py_func", shares_rule.by_credit)

_MAX_ADAPTERS: Final = 100_000
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class ReportedState(BaseModel):
    """State of an instance as its ``/state`` returns it; see `capplan.engine.state_report.StateReport`."""

    model_config = ConfigDict(extra="ignore")

    running: _Count
    queued: _Count
    free_blocks: _Count
    blocks: _Count
    block_size: _Count
    max_num_seqs: _Count
    max_loras: _Count
    active_adapters: _Count
    queued_adapters: _Count
    running_tokens: _Count
    partial_tokens: _Count
    by_rank: dict[Annotated[int, Field(ge=0)], tuple[_Count, _Count, _Count]]
    adapters: Annotated[dict[str, int], Field(max_length=_MAX_ADAPTERS)]
    answers: _Count = 0
    answer_tokens: _Count = 0


_RECORD_FIELDS: Final = tuple(
    name
    for name in ReportedState.model_fields
    if name not in ("by_rank", "adapters", "answers", "answer_tokens")
)


@dataclass(frozen=True)
class RoutingSettings:
    """Router of a running cluster.

    Attributes
    ----------
    rule
        Compiled rule with its models, one per instance; None: smooth-shares.
    rank_of
        Ranks of the adapters.
    state_period_s
        Time between reports of an instance, for rules that read them.
    """

    rule: RoutingRule | None = None
    rank_of: Mapping[str, int] | None = None
    state_period_s: float = STATE_PERIOD_S


class _Sent(NamedTuple):
    """A request sent to an instance."""

    at_ns: int
    place: int
    rank: int
    prompt_tokens: int


class InstanceRouter:
    """Chooses an available holder of the adapter of each request, as in the cluster twin.

    The share of unavailable holders goes to the others in proportion. Their credit does not change meanwhile.
    Rules that read the state of instances get their last report and the requests sent since it was asked for.

    Parameters
    ----------
    held
        Adapters of each instance with the share of the adapter's requests meant for it. Shares are normalised
        over holders.
    base
        Share of the base model's requests meant for each instance; None: equal shares.
    settings
        The rule; by default smooth weighted round robin.
    seed
        Seed of random rules.
    """

    def __init__(
        self,
        held: Sequence[Mapping[str, float]],
        base: Sequence[float] | None = None,
        settings: RoutingSettings | None = None,
        seed: int = 0,
    ) -> None:
        holders: dict[str | None, list[tuple[int, float]]] = {
            None: list(enumerate(base or [1.0] * len(held)))
        }
        for i, shares in enumerate(held):
            for name, share in shares.items():
                holders.setdefault(name, []).append((i, share))
        self._number = {name: number for number, name in enumerate(holders)}
        self._placement = _placement(list(holders.values()))
        self._credit = shares_rule.first_credit(self._placement)
        settings = settings or RoutingSettings()
        ranks = settings.rank_of or {}
        self._rank = [0, *(ranks.get(name, 1) for name in holders if name is not None)]
        self._places = {
            (name, instance): int(self._placement.start[number]) + at
            for name, number in self._number.items()
            for at, (instance, _) in enumerate(holders[name])
        }
        self._rule = None
        self._draw = np.random.default_rng(seed).random
        self._answers = np.zeros((len(held), 2), np.int64)
        if settings.rule is not None:
            by_rank = settings.rule.code in ASK_RANKS
            self._rule = settings.rule._replace(credit=self._credit, turn=np.full(1, -1, np.int64))
            self._fleet = new_fleet(len(held), np.array(self._rank), by_rank, len(self._places))
            self._fleet.instances.seen_ns = NEVER_SEEN
            self._fleet.instances.block_size = self._fleet.instances.blocks = 1
            self._sent: list[deque[_Sent]] = [deque() for _ in held]
            self._compile()

    def _compile(self) -> None:
        """Compile the rule, on copies of its state, so that no request waits for it."""
        rule, fleet = self._rule, self._fleet
        if rule is None:
            return
        rule = rule._replace(credit=rule.credit.copy(), turn=rule.turn.copy())
        copied = Fleet(fleet.instances.copy(), fleet.by_rank.copy(), fleet.ranks, fleet.standing.copy())
        route(rule, copied, self._placement, ArrivingRequest(0, 0, 1, 1.0, 0.0, 0))
        note(copied, self._placement, 0, 0, 1)

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._number

    @property
    def looks(self) -> bool:
        """Whether the rule reads the state of instances."""
        return self._rule is not None and self._rule.looks

    def holders(self, adapter: str | None) -> list[int]:
        """Return the instances with an adapter; None is the base model."""
        return [int(each) for each in self._placement.instance[slice(*self._range(adapter))]]

    def choose(
        self,
        adapter: str | None,
        available: Callable[[int], bool],
        prompt_tokens: int = 0,
        now_ns: int | None = None,
    ) -> int | None:
        """Return the instance of the next request; None if no holder is available.

        Parameters
        ----------
        adapter
            Its adapter; None is the base model.
        available
            Whether an instance takes requests.
        prompt_tokens
            Length of its prompt, or an estimate.
        now_ns
            Time on the monotonic clock; None: now.
        """
        first, last = self._range(adapter)
        places = [place for place in range(first, last) if available(int(self._placement.instance[place]))]
        if not places:
            return None
        if self._rule is None:
            return self._by_shares(places, last - first)
        number = self._number[adapter]
        request = ArrivingRequest(
            adapter=number,
            rank=self._rank[number],
            prompt_tokens=prompt_tokens,
            mean_answer=self._mean_answer(),
            draw=float(self._draw()),
            now_ns=time.monotonic_ns() if now_ns is None else now_ns,
        )
        if len(places) == last - first:
            place = route(self._rule, self._fleet, self._placement, request)
        else:
            place = self._route_among(places, request)
        instance = int(self._placement.instance[place])
        self._sent[instance].append(_Sent(request.now_ns, place, request.rank, prompt_tokens))
        return instance

    def report(self, instance: int, document: bytes, asked_ns: int) -> None:
        """Take the state of an instance.

        Parameters
        ----------
        document
            Body of its ``/state``.
        asked_ns
            Time at which it was asked for. The instance may have counted some of the requests sent since,
            which count twice until its next report.

        Raises
        ------
        ValueError
            If the document is no state.
        """
        state = ReportedState.model_validate_json(document)
        self.forget(instance)
        fleet = self._fleet
        record = fleet.instances[instance]
        for name in _RECORD_FIELDS:
            record[name] = getattr(state, name)
        record["seen_ns"] = asked_ns
        record["block_size"], record["blocks"] = max(1, state.block_size), max(1, state.blocks)
        known = set(self._rank) if fleet.by_rank.shape[2] else set()
        for rank, counts in state.by_rank.items():
            if rank in known:
                fleet.by_rank[instance, :, rank] = counts
        for name, bits in state.adapters.items():
            place = self._places.get((name, instance))
            if place is not None:
                fleet.standing[place] = bits
        fleet.standing[self._places[None, instance]] = 0
        self._answers[instance] = state.answers, state.answer_tokens
        sent = self._sent[instance]
        while sent and sent[0].at_ns < asked_ns:
            sent.popleft()
        for each in sent:
            note(fleet, self._placement, each.place, each.rank, each.prompt_tokens)

    def forget(self, instance: int) -> None:
        """Forget the state of an instance, which has ended or reports another one."""
        if self._rule is None:
            return
        fleet = self._fleet
        fleet.instances[instance] = np.zeros((), fleet.instances.dtype)
        fleet.instances.seen_ns[instance] = NEVER_SEEN
        fleet.instances.block_size[instance] = fleet.instances.blocks[instance] = 1
        fleet.by_rank[instance] = 0
        fleet.standing[self._placement.instance == instance] = 0

    def age_s(self, instance: int) -> float:
        """Return the age of the state of an instance; NaN if there is none."""
        if self._rule is None or self._fleet.instances.seen_ns[instance] == NEVER_SEEN:
            return float("nan")
        return float(time.monotonic_ns() - self._fleet.instances.seen_ns[instance]) * 1e-9

    def _mean_answer(self) -> float:
        """Return the mean output tokens of the finished requests, and one of the rule's first estimate."""
        answers, tokens = self._answers.sum(axis=0).tolist()
        return (self._rule.first_answer + tokens) / (1.0 + answers) if self._rule is not None else 1.0

    def _by_shares(self, places: list[int], holders: int) -> int:
        share, credit = self._placement.share[places], self._credit[places]
        if len(places) < holders:
            share = _normalised(share)
        chosen = _by_credit(self._placement._replace(share=share), 0, share.size, credit)
        self._credit[places] = credit
        return int(self._placement.instance[places[chosen]])

    def _route_among(self, places: list[int], request: ArrivingRequest) -> int:
        """Return the place that the rule chooses of some of the holders."""
        placement, fleet, rule = self._placement, self._fleet, self._rule
        part = Placement(
            start=np.array([0, len(places)], np.int64),
            instance=placement.instance[places],
            local=placement.local[places],
            share=_normalised(placement.share[places]),
        )
        seen = fleet._replace(standing=fleet.standing[places])
        own = rule._replace(credit=self._credit[places])  # type: ignore[union-attr]
        chosen = int(route(own, seen, part, request._replace(adapter=0)))
        fleet.standing[places], self._credit[places] = seen.standing, own.credit
        return places[chosen]

    def _range(self, adapter: str | None) -> tuple[int, int]:
        number = self._number[adapter]
        return int(self._placement.start[number]), int(self._placement.start[number + 1])


def _normalised(share: NDArray[np.float64]) -> Any:
    """Return shares that sum to 1; equal ones if all are 0."""
    total = share.sum()
    return share / total if total > 0 else np.full(share.size, 1.0 / share.size)


def _placement(lists: Sequence[Sequence[tuple[int, float]]]) -> Placement:
    """Return a placement from the (instance, share) of each adapter's holders; zero shares count as equal."""
    shares = [_normalised(np.array([share for _, share in holders], np.float64)) for holders in lists]
    counts = [len(holders) for holders in lists]
    return Placement(
        start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        instance=np.array([i for holders in lists for i, _ in holders], np.int32),
        local=np.zeros(sum(counts), np.int32),  # not used: instances number their adapters themselves
        share=np.concatenate(shares),
    )
