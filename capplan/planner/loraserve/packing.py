"""Step 3 of Algorithm 1: fractional bin packing of one rank's adapters on the servers of that rank."""

from __future__ import annotations

from collections.abc import Sequence

from capplan.planner.loraserve.filling import AdapterLoad, Filling, Rest


def pack(loads: Sequence[AdapterLoad], servers: Sequence[Filling], cap: float, rest: Rest) -> None:
    """Fill the servers one after the other, hottest adapters first; who crosses an edge is split there.

    Next fit with splitting: at most one more replica per server than there are adapters, few hot adapters on
    the first server and the long tail on the last (the paper's figure 12). What does not fit below the cap
    stays in `rest`. Adapters without demand go to the server that stores fewest bytes: each lives somewhere.

    Parameters
    ----------
    loads
        All adapters of one rank.
    servers
        Those that the rank has for itself, at least one.
    cap
        Utilisation up to which a server is filled.
    rest
        What is left of every adapter; changed.
    """
    asking = sorted((load for load in loads if load.tok_s > 0.0), key=lambda load: (-load.tok_s, load.name))
    at = 0
    for load in asking:
        while rest.of(load) > 0.0 and at < len(servers):
            room_tok_s = servers[at].room_tok_s(cap, load.rank)
            if room_tok_s > 0.0:
                rest.place(load, servers[at], room_tok_s / load.tok_s)
            if rest.of(load) > 0.0:
                at += 1
    for load in sorted((load for load in loads if load.tok_s == 0.0), key=lambda load: load.name):
        rest.place(load, min(servers, key=Filling.stored), 1.0)
