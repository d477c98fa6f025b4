"""Choice of the instance of a request, by the rules of the cluster twin and the states of instances.

Routing table of a running router: holders of each adapter with their shares, replaced as a whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from capplan.errors import InputError
from capplan.serving.routers import (
    ACTIVE,
    AWAITED,
    NEVER_SEEN,
    ArrivingRequest,
    Fleet,
    Placement,
    RoutingRule,
    by_credit,
    carried_credit,
    first_credit,
    new_fleet,
    normalised_shares,
    note,
    placement_of,
    route,
    with_ranks,
)
from capplan.spec import STATE_PERIOD_S


@dataclass(frozen=True)
class RoutingTable:
    """Holders of every adapter, by number; None, the base model, is 0.

    Places of the placement beyond those of the last adapter are former ones, which get no requests.
    `place_of` has the places of the adapters of each instance, former ones included.
    """

    numbers: Mapping[str | None, int]
    ranks: Mapping[str, int]
    placement: Placement
    place_of: Sequence[Mapping[str | None, int]]

    @classmethod
    def of(
        cls,
        held: Sequence[Mapping[str, float]],
        base: Sequence[float] | None = None,
        ranks: Mapping[str, int] | None = None,
        previous: RoutingTable | None = None,
    ) -> RoutingTable:
        """Return the table of the shares of instances, which are normalised over holders.

        Parameters
        ----------
        held
            Adapters of each instance with the share of the adapter's requests meant for it.
        base
            Share of the base model's requests meant for each instance; None: equal shares.
        ranks
            Ranks of the adapters; None: those of `previous`, or 1.
        previous
            Table in force. Adapters that it has come first, in its order.

        Raises
        ------
        InputError
            If an adapter of `ranks` has no holder, another one has, or `previous` has another number of
            instances.
        """
        holders: dict[str | None, list[tuple[int, float]]] = {
            None: list(enumerate(base or [1.0] * len(held)))
        }
        for i, shares in enumerate(held):
            for name, share in shares.items():
                holders.setdefault(name, []).append((i, share))
        if previous is not None:
            if len(held) != len(previous.place_of):
                rule = f"must have an entry for each of {len(previous.place_of)} instances"
                raise InputError(rule, len(held), "shares")
            if ranks is None:
                ranks = previous.ranks
            first = [adapter for adapter in previous.numbers if adapter in holders]
            holders = {adapter: holders[adapter] for adapter in dict.fromkeys([*first, *holders])}
        names = [adapter for adapter in holders if adapter is not None]
        ranks = dict.fromkeys(names, 1) if ranks is None else ranks
        if other := ranks.keys() ^ set(names):
            rule = "must be an adapter of the table, with an instance that holds it"
            raise InputError(rule, min(other), "shares")
        placement = _placement(list(holders.values()))
        place_of: list[dict[str | None, int]] = [{} for _ in held]
        for number, (adapter, own) in enumerate(holders.items()):
            for place, (instance, _) in enumerate(own, int(placement.start[number])):
                place_of[instance][adapter] = place
        return cls({adapter: number for number, adapter in enumerate(holders)}, ranks, placement, place_of)

    def with_former(self, former: Sequence[Collection[str | None]]) -> RoutingTable:
        """Return the table with places for adapters that instances do not hold any more."""
        placement, place_of = self.placement, [dict(own) for own in self.place_of]
        instances: list[int] = []
        for i, names in enumerate(former):
            for name in names:
                if name not in place_of[i]:
                    place_of[i][name] = placement.instance.size + len(instances)
                    instances.append(i)
        more = np.zeros(len(instances), np.int32)
        placement = placement._replace(
            instance=np.append(placement.instance, np.array(instances, np.int32)),
            local=np.append(placement.local, more),
            share=np.append(placement.share, more.astype(np.float64)),
        )
        return RoutingTable(self.numbers, self.ranks, placement, place_of)

    def numbers_of(self, before: RoutingTable) -> NDArray[np.int64]:
        """Return the number here of each adapter of another table, -1 without."""
        return np.array([self.numbers.get(adapter, -1) for adapter in before.numbers], np.int64)

    def shares(self) -> tuple[list[dict[str, float]], list[float]]:
        """Return the shares of the adapters of each instance, and those of the base model's requests."""
        end, share = int(self.placement.start[-1]), self.placement.share.tolist()
        adapters = [
            {name: share[place] for name, place in own.items() if name is not None and place < end}
            for own in self.place_of
        ]
        return adapters, [share[own[None]] for own in self.place_of]

    def carry(self, values: NDArray[Any], before: RoutingTable, fresh: NDArray[Any]) -> NDArray[Any]:
        """Return `fresh`, an array by place, with the values of the places that the table before has too."""
        for own, old in zip(self.place_of, before.place_of, strict=True):
            both = own.keys() & old.keys()
            fresh[[own[name] for name in both]] = values[[old[name] for name in both]]
        return fresh


def _placement(lists: Sequence[Sequence[tuple[int, float]]]) -> Placement:
    """Return a placement from the (instance, share) of each adapter's holders; zero shares count as equal."""
    adapter = np.repeat(np.arange(len(lists)), [len(holders) for holders in lists])
    instance = np.array([i for holders in lists for i, _ in holders], np.int64)
    share = np.array([share for holders in lists for _, share in holders], np.float64)
    local = np.zeros(adapter.size, np.int64)  # not used: instances number their adapters themselves
    return placement_of(adapter, instance, local, normalised_shares(adapter, share), len(lists) - 1)


# The plain Python function: nothing is compiled before the first request.
_by_credit: Final[Callable[..., int]] = getattr(by_credit, "py_func", by_credit)

_MAX_ADAPTERS: Final = 100_000
_MAX_SENT: Final = 10_000
"""Requests kept per instance until its next report."""
_MAX_AVAILABLE: Final = 1024
"""Adapters whose available holders are kept until an instance goes or comes back."""
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class ReportedState(BaseModel):
    """State of an instance as its ``/state`` returns it; see `capplan.engine.StateReport`."""

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
    adapters: Annotated[dict[str, _Count], Field(max_length=_MAX_ADAPTERS)]
    answers: _Count = 0
    answer_tokens: _Count = 0
    awaiting: Annotated[dict[str, tuple[_Count, _Count]], Field(max_length=_MAX_ADAPTERS)] = {}
    """Requests that wait for the transfer of an adapter, which are in no other count, and prompt tokens."""


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
    fetch_ranks
        Largest rank of the adapters that each instance can fetch; 0: none. Requests of an adapter whose
        holders are all unavailable go to instances that can fetch it, by the shares of the base model. None:
        instances have the adapters that they hold, and no others.
    """

    rule: RoutingRule | None = None
    rank_of: Mapping[str, int] | None = None
    state_period_s: float = STATE_PERIOD_S
    fetch_ranks: Sequence[int] | None = None


class Choice(NamedTuple):
    """Instance of a request."""

    instance: int
    at_ns: int
    """Time on the monotonic clock at which it gets the request."""


class _Sent(NamedTuple):
    """A request for an instance."""

    at_ns: int
    """Time at which it is sent."""
    adapter: str | None
    rank: int
    prompt_tokens: int


class _Holders(NamedTuple):
    """Available holders of one adapter."""

    places: NDArray[np.int64]
    """Their places in the placement of all."""
    placement: Placement
    """They alone, as holders of adapter 0; their shares sum to 1."""


class InstanceRouter:
    """Chooses an available holder of the adapter of each request, as in the cluster twin.

    The share of unavailable holders goes to the others in proportion. Their credit does not change meanwhile.
    Rules that read the state of instances get their last report and the requests sent since it was asked for.
    Without a rule it is smooth weighted round robin. Shares are as for `RoutingTable.of`.
    """

    def __init__(
        self,
        held: Sequence[Mapping[str, float]],
        base: Sequence[float] | None = None,
        settings: RoutingSettings | None = None,
        seed: int = 0,
    ) -> None:
        settings = settings or RoutingSettings()
        ranks = settings.rank_of or {}
        self._use(RoutingTable.of(held, base, {name: ranks.get(name, 1) for own in held for name in own}))
        self._credit = first_credit(self._placement)
        fetch_ranks = settings.fetch_ranks
        self._fetch_ranks = None if fetch_ranks is None else np.array(fetch_ranks, np.int64)
        self._is_up = np.ones(len(held), np.bool_)
        self._down = 0
        self._rule = None
        self._draw = np.random.default_rng(seed).random
        self._answers = np.zeros((len(held), 2), np.int64)
        self._mean_answer = 1.0
        if settings.rule is not None:
            by_rank = settings.rule.reads_ranks
            self._rule = settings.rule._replace(credit=self._credit, turn=np.full(1, -1, np.int64))
            self._mean_answer = self._rule.prior_output_tokens
            self._fleet = new_fleet(len(held), np.array(self._rank), by_rank, self._credit.size)
            self._records = self._fleet.instances.view(np.ndarray)
            self._known_ranks = frozenset(self._rank if by_rank else ())
            self._sent: list[deque[_Sent]] = [deque(maxlen=_MAX_SENT) for _ in held]
            self._marked: list[set[int]] = [set() for _ in held]
            for instance in range(len(held)):
                self.forget(instance)
            self._compile()

    def _use(self, table: RoutingTable) -> None:
        self._table = table
        self._number, self._placement, self._place_of = table.numbers, table.placement, table.place_of
        self._rank = [0, *(table.ranks[name] for name in table.numbers if name is not None)]
        self._available: dict[int, _Holders | None] = {}

    def table(
        self,
        held: Sequence[Mapping[str, float]],
        base: Sequence[float] | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> RoutingTable:
        """Return the routing table of new shares, for `swap`; see `RoutingTable.of`."""
        return RoutingTable.of(held, base, ranks, self._table)

    def swap(self, table: RoutingTable) -> None:
        """Put a routing table in force, from the next request on.

        Holders that stay keep their credit and what they have reported. Requests sent since the last reports
        still count at their instances, also those of adapters that are no longer in the table.
        """
        before = self._table
        numbers = table.numbers_of(before)
        credit = carried_credit(self._credit, before.placement, table.placement, numbers)
        if self._rule is not None:
            table = table.with_former([{each.adapter for each in sent} for sent in self._sent])
        self._use(table)
        self._credit = np.append(credit, np.zeros(table.placement.share.size - credit.size))
        if self._rule is None:
            return
        self._rule = self._rule._replace(credit=self._credit)
        standing = np.zeros(self._credit.size, np.int64)
        fleet = self._fleet._replace(standing=table.carry(self._fleet.standing, before, standing))
        self._fleet = with_ranks(fleet, np.array(self._rank))
        if self._known_ranks:
            self._known_ranks = frozenset(self._fleet.ranks.tolist())
        for own, marked in zip(self._place_of, self._marked, strict=True):
            marked.clear()
            marked.update(place for place in own.values() if self._fleet.standing[place])

    @property
    def adapters(self) -> list[str | None]:
        """All adapters; None is the base model."""
        return list(self._number)

    @property
    def ranks(self) -> Mapping[str, int]:
        """Ranks of the adapters; replaced as a whole, with the routing table."""
        return self._table.ranks

    def shares(self) -> tuple[list[dict[str, float]], list[float]]:
        """Return the shares in force of each instance's adapters, and those of the base model's requests."""
        return self._table.shares()

    def _compile(self) -> None:
        """Compile the rule, on copies of its state, so that no request waits for it."""
        rule, fleet = self._rule, self._fleet
        if rule is None:
            return
        rule = rule._replace(credit=rule.credit.copy(), turn=rule.turn.copy())
        copied = Fleet(fleet.instances.copy(), fleet.by_rank.copy(), fleet.ranks, fleet.standing.copy())
        route(rule, copied, self._placement, ArrivingRequest(0, 0, 1, 1.0, 0.0, 0))
        note(copied, self._placement, 0, 0, 1, 1)

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._number

    @property
    def reads_state(self) -> bool:
        """Whether the rule reads the state of instances."""
        return self._rule is not None and self._rule.reads_state

    def holders(self, adapter: str | None) -> list[int]:
        """Return the instances with an adapter; None is the base model."""
        number = self._number[adapter]
        first, last = self._placement.start[number : number + 2].tolist()
        return [int(each) for each in self._placement.instance[first:last]]

    def set_available(self, instance: int, is_available: bool) -> None:
        """Set whether an instance takes requests; at first all do."""
        if self._is_up[instance] != is_available:
            self._is_up[instance] = is_available
            self._down += -1 if is_available else 1
            self._available.clear()

    def choose(
        self,
        adapter: str | None,
        prompt_tokens: int = 0,
        excluded: Collection[int] = (),
        now_ns: int | None = None,
        *,
        elsewhere: bool = False,
    ) -> int | None:
        """Return the instance of the next request as `decide`, without the time."""
        choice = self.decide(adapter, prompt_tokens, excluded, now_ns, elsewhere=elsewhere)
        return None if choice is None else choice.instance

    def decide(
        self,
        adapter: str | None,
        prompt_tokens: int = 0,
        excluded: Collection[int] = (),
        now_ns: int | None = None,
        *,
        elsewhere: bool = False,
    ) -> Choice | None:
        """Return the instance of the next request, and when it gets it; None if no holder is available.

        Parameters
        ----------
        adapter
            Its adapter; None is the base model.
        prompt_tokens
            Length of its prompt, or an estimate.
        excluded
            Instances that are not available for this request.
        now_ns
            Time on the monotonic clock; None: now.
        elsewhere
            Whether an instance that can fetch the adapter is chosen also if excluded holders are available.
        """
        number = self._number[adapter]
        rank = self._rank[number]
        among = self._holders_up(number, excluded) if self._down or excluded else None
        if among is not None and not among.places.size:
            if self._fetch_ranks is None or (self._has_holder_up(number) and not elsewhere):
                return None
            unable = np.flatnonzero(self._fetch_ranks < rank).tolist()
            adapter, number = None, 0
            among = self._holders_up(number, {*excluded, *unable})
            if among is None or not among.places.size:
                return None
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if self._rule is None:
            return Choice(int(self._placement.instance[self._by_shares(number, among)]), now_ns)
        request = ArrivingRequest(
            adapter=number,
            rank=rank,
            prompt_tokens=prompt_tokens,
            mean_answer=self._mean_answer,
            draw=self._draw(),
            now_ns=now_ns,
        )
        if among is None:
            place, at_ns = route(self._rule, self._fleet, self._placement, request)
        else:
            place, at_ns = self._route_among(among, request)
        instance = int(self._placement.instance[place])
        if self._rule.reads_state:
            self._marked[instance].add(place)
            self._sent[instance].append(_Sent(at_ns, adapter, request.rank, prompt_tokens))
        return Choice(instance, at_ns)

    def report(self, instance: int, document: bytes, asked_ns: int) -> None:
        """Take the state of an instance, the body of its ``/state``; raise `ValueError` if it is none.

        The instance may have counted some of the requests sent since it was asked, which count twice until
        its next report.
        """
        state = ReportedState.model_validate_json(document)
        fleet = self._fleet
        values = {**state.__dict__, "seen_ns": asked_ns}
        values["block_size"], values["blocks"] = max(1, state.block_size), max(1, state.blocks)
        self._set_record(instance, values)
        for rank, counts in state.by_rank.items():
            if rank in self._known_ranks:
                fleet.by_rank[instance, :, rank] = counts
        place_of, marked = self._place_of[instance], self._marked[instance]
        for name, bits in state.adapters.items():
            place = place_of.get(name)
            if place is not None:
                fleet.standing[place] = bits
                marked.add(place)
        self._answers[instance] = state.answers, state.answer_tokens
        answers, tokens = self._answers.sum(axis=0).tolist()
        self._mean_answer = (self._rule.prior_output_tokens + tokens) / (1.0 + answers)  # type: ignore[union-attr]
        later = (each for each in self._sent[instance] if each.at_ns >= asked_ns)
        sent = self._sent[instance] = deque(later, _MAX_SENT)
        waiting = [(place_of[each.adapter], each.rank, 1, each.prompt_tokens) for each in sent]
        for name, (requests, tokens) in state.awaiting.items():
            rank = self._rank[self._number.get(name, 0)]
            if name in place_of:
                waiting.append((place_of[name], rank, requests, tokens))
            else:
                is_new = not state.adapters.get(name, 0) & (ACTIVE | AWAITED)
                self._add_unplaced(instance, rank, (requests, requests, tokens), is_new)
        for each in waiting:
            note(fleet, self._placement, *each)
            marked.add(each[0])

    def _add_unplaced(self, instance: int, rank: int, counts: tuple[int, int, int], is_new: bool) -> None:
        """Add waiting requests of an adapter that an instance fetches and does not hold; `counts` by rank."""
        self._records["queued"][instance] += counts[0]
        self._records["queued_adapters"][instance] += is_new
        if rank in self._known_ranks:
            self._fleet.by_rank[instance, :, rank] += counts

    def forget(self, instance: int) -> None:
        """Forget the state of an instance, which has ended or reports another one."""
        if self._rule is None:
            return
        self._set_record(instance, {"seen_ns": NEVER_SEEN, "block_size": 1, "blocks": 1})

    def _set_record(self, instance: int, values: Mapping[str, int]) -> None:
        """Set the counts of an instance, and clear those by rank and by adapter."""
        fleet, marked = self._fleet, self._marked[instance]
        self._records[instance] = tuple(values.get(name, 0) for name in self._records.dtype.names or ())
        fleet.by_rank[instance] = 0
        fleet.standing[list(marked)] = 0
        marked.clear()

    def age_s(self, instance: int) -> float:
        """Return the age of the state of an instance; NaN if there is none."""
        if self._rule is None or self._fleet.instances.seen_ns[instance] == NEVER_SEEN:
            return float("nan")
        return float(time.monotonic_ns() - self._fleet.instances.seen_ns[instance]) * 1e-9

    def _holders_up(self, number: int, excluded: Collection[int]) -> _Holders | None:
        """Return the available holders of an adapter; None: all holders."""
        if excluded:
            return self._select(number, excluded)
        if number not in self._available:
            if len(self._available) >= _MAX_AVAILABLE:
                self._available.clear()
            self._available[number] = self._select(number)
        return self._available[number]

    def _has_holder_up(self, number: int) -> bool:
        first, last = self._placement.start[number : number + 2].tolist()
        return bool(self._is_up[self._placement.instance[first:last]].any())

    def _select(self, number: int, excluded: Collection[int] = ()) -> _Holders | None:
        placement = self._placement
        first, last = placement.start[number : number + 2].tolist()
        holders = placement.instance[first:last]
        mask = self._is_up[holders]
        if excluded:
            mask &= ~np.isin(holders, list(excluded))
        if mask.all():
            return None
        places = first + np.flatnonzero(mask)
        part = Placement(
            start=np.array([0, places.size], np.int64),
            instance=placement.instance[places],
            local=placement.local[places],
            share=normalised_shares(np.zeros(places.size, np.int64), placement.share[places]),
        )
        return _Holders(places, part)

    def _by_shares(self, number: int, among: _Holders | None) -> int:
        """Return the place by smooth shares, without compiled code."""
        if among is None:
            first, last = self._placement.start[number : number + 2].tolist()
            return _by_credit(self._placement, first, last, self._credit)
        credit = self._credit[among.places]
        chosen = _by_credit(among.placement, 0, credit.size, credit)
        self._credit[among.places] = credit
        return int(among.places[chosen])

    def _route_among(self, among: _Holders, request: ArrivingRequest) -> tuple[int, int]:
        """Return the place that the rule chooses of some of the holders, and when it gets the request."""
        fleet, rule, places = self._fleet, self._rule, among.places
        seen = fleet._replace(standing=fleet.standing[places])
        own = rule._replace(credit=self._credit[places])  # type: ignore[union-attr]
        chosen, at_ns = route(own, seen, among.placement, request._replace(adapter=0))
        fleet.standing[places], self._credit[places] = seen.standing, own.credit
        return int(places[chosen]), at_ns
