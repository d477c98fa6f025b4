"""CPU time of the load generator per token and per request: ``python -m benchmarks.load_client``.

Servers in child processes write one token to every stream per step, as an engine does. The client, in a
process of its own, sends three workloads: long answers, answers of one token on connections that stay open,
and answers of one token on a connection each, as an overloaded server needs. CPU seconds of the client are
``requests x per request + tokens x per token``; the first two runs give both, the third the request on a new
connection.

``--against CHECKOUT`` measures another version of the package in the same rounds, each beside this one, and
compares: ``git worktree add CHECKOUT COMMIT`` makes one. Exit status 1 if a cost is above `BAR` of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common import command_line, markdown
from benchmarks.stand_in_servers import running

BAR: Final = 0.5
_HERE: Final = Path(__file__).resolve()
_GAP_MS: Final = 5.0


@dataclass(frozen=True)
class Costs:
    """CPU time of the client, in microseconds."""

    token_us: float
    request_us: float
    """On a connection that was open."""
    new_connection_us: float
    """Request on a new connection."""

    @classmethod
    def of(cls, long: dict[str, float], short: dict[str, float], closing: dict[str, float]) -> Costs:
        """Solve for the costs; each run gives ``cpu_s``, ``requests`` and ``tokens``."""
        tokens, requests = long["tokens"], long["requests"]
        per_request = short["tokens"] / short["requests"]
        token_s = (long["cpu_s"] - short["cpu_s"] * requests / short["requests"]) / (
            tokens - per_request * requests
        )
        kept, new = (
            (each["cpu_s"] - each["tokens"] * token_s) / each["requests"] for each in (short, closing)
        )
        return cls(1e6 * token_s, 1e6 * kept, 1e6 * new)


def costs_of(checkout: Path, loads: list[dict[str, Any]]) -> Costs:
    """Measure the package of a checkout in a new process."""
    command = [sys.executable, str(_HERE.with_name("load_client_worker.py")), json.dumps(loads)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Costs.of(*json.loads(done.stdout))


def median(runs: list[Costs]) -> Costs:
    return Costs(*(statistics.median(column) for column in zip(*map(astuple, runs), strict=True)))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", dest="duration_s", type=float, default=6.0)
    given = parser.parse_args()
    checkouts = {"this": _HERE.parents[1]}
    if given.against is not None:
        checkouts = {"before": given.against.resolve(), **checkouts}
    found: dict[str, list[Costs]] = {name: [] for name in checkouts}
    with ExitStack() as servers:
        kept, closing = (
            servers.enter_context(running("paced", gap_ms=_GAP_MS, close=close)) for close in (False, True)
        )
        plans = ((kept, 20.0, 250), (kept, 250.0, 1), (closing, 250.0, 1))
        names = ("url", "rate_rps", "output_tokens")
        loads = [dict(zip(names, plan, strict=True), duration_s=given.duration_s) for plan in plans]
        for _ in range(given.rounds):
            for name, checkout in checkouts.items():
                found[name].append(costs_of(checkout, loads))
    header = ("version", "CPU us per token", "per request", "per request on a new connection")
    medians = {name: median(runs) for name, runs in found.items()}
    rows = [[name, *(f"{each:.1f}" for each in astuple(costs))] for name, costs in medians.items()]
    if given.against is None:
        print(markdown(header, rows))
        return 0
    before, after = astuple(medians["before"]), astuple(medians["this"])
    shares = [new / old for new, old in zip(after, before, strict=True)]
    print(markdown(header, [*rows, ["share", *(f"{share:.2f}" for share in shares)]]))
    print(f"\nmedians of {given.rounds} rounds; bar: a share of at most {BAR:g}")
    return int(max(shares) > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
