"""Step 4 of Algorithm 1: adapters of ranks without a server, and what did not fit on those of its rank.

"The server with highest max rank and least utilization", to the letter, piles all leftovers on the server of
the largest rank while others idle; the text says "preferentially" and "if possible". By default a leftover
therefore goes where there is room, and the cap of all servers rises when nobody has any (PAPER_NOTES
section 2, item 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from capplan.planner.loraserve.filling import AdapterLoad, Filling, Rest


def place_leftovers(
    loads: Sequence[AdapterLoad],
    servers: Sequence[Filling],
    cap: float,
    rest: Rest,
    *,
    cap_step: float,
    least_rest: float,
) -> float:
    """Place what is left, largest rank first, then largest demand; return the cap that it took.

    Parameters
    ----------
    loads
        All adapters.
    servers
        All servers.
    cap
        Utilisation up to which servers are filled at first.
    rest
        What is left of every adapter; afterwards nothing.
    cap_step
        By how much the cap rises when nobody has room, as a share of the first cap. Finer steps balance
        better, but split adapters into more replicas.
    least_rest
        A smaller rest of an adapter stays with the server that took its last share, cap or not.
    """
    step = cap_step * cap
    for load in _ordered(loads, rest):
        while rest.of(load) > 0.0:
            holders = rest.holders(load)
            if holders and rest.of(load) < least_rest:
                rest.place(load, holders[-1], rest.of(load))
            elif _has_all_replicas(load, holders):
                rest.place(load, min(holders, key=Filling.utilization), rest.of(load))
            else:
                server = _with_room(load, servers, cap)
                if server is None:
                    cap = _raised(load, servers, cap, step)
                else:
                    rest.place(load, server, server.room_tok_s(cap, load.rank) / load.tok_s)
    _place_idle(loads, servers, rest)
    return cap


def place_leftovers_literally(loads: Sequence[AdapterLoad], servers: Sequence[Filling], rest: Rest) -> None:
    """Place what is left to the letter: all of it on the server of the highest max rank, cap or not."""
    for load in _ordered(loads, rest):
        open_to_it = rest.holders(load) if _has_all_replicas(load, rest.holders(load)) else servers
        highest = min(open_to_it, key=lambda server: (-server.max_rank, server.utilization()))
        rest.place(load, highest, rest.of(load))
    _place_idle(loads, servers, rest)


def _ordered(loads: Sequence[AdapterLoad], rest: Rest) -> list[AdapterLoad]:
    left = (load for load in loads if load.tok_s > 0.0 and rest.of(load) > 0.0)
    return sorted(left, key=lambda load: (-load.rank, -load.tok_s * rest.of(load), load.name))


def _has_all_replicas(load: AdapterLoad, holders: Sequence[Filling]) -> bool:
    return load.max_replicas is not None and len(holders) >= load.max_replicas


def _with_room(load: AdapterLoad, servers: Sequence[Filling], cap: float) -> Filling | None:
    """Return the server of the highest max rank, then the least utilised, that has room.

    One whose max rank the adapter would raise, or an empty one, is second choice.
    """
    free = [server for server in servers if server.room_tok_s(cap, load.rank) > 0.0]
    at_home = [server for server in free if server.max_rank >= load.rank]
    if at_home:
        return min(at_home, key=lambda server: (-server.max_rank, server.utilization()))
    return min(free, key=lambda server: server.utilization(load.rank), default=None)


def _raised(load: AdapterLoad, servers: Sequence[Filling], cap: float, step: float) -> float:
    """Return the cap after the fewest steps with which a server has room."""
    least = min(server.utilization(load.rank) for server in servers)
    raised = cap + step * max(1, math.floor((least - cap) / step))
    while all(server.room_tok_s(raised, load.rank) == 0.0 for server in servers):
        raised += step
    return raised


def _place_idle(loads: Sequence[AdapterLoad], servers: Sequence[Filling], rest: Rest) -> None:
    """Give adapters without demand a home: where their rank disturbs nobody, with fewest bytes stored."""
    idle = [load for load in loads if load.tok_s == 0.0 and rest.of(load) > 0.0]
    for load in sorted(idle, key=lambda load: (-load.rank, load.name)):
        rest.place(load, min(servers, key=lambda s: (0 < s.max_rank < load.rank, *s.stored())), 1.0)
