"""Kills and stops of the cores that assist loading, under load: ``python -m benchmarks.killed_cores``.

An engine with slow copies answers requests of cold adapters one batch after the other, while its cores are
killed and stopped at random. Every answer is that of an engine with all adapters loaded, none takes longer
than a bound, and after the engine is closed neither processes nor descriptors are left.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import command_line
from capplan.engine import Completion, Engine
from capplan.spec import Cache

RANKS: Final = {"a0": 1, "a1": 4, "a2": 8, "a3": 16}
LONGEST_S: Final = 10.0


def engine(loading: str, **more: Any) -> Engine:
    ahead = {"prefetch": "none", "cpu_workers": 2} if loading == "assisted" else {}
    cache = Cache.model_validate({"policy": "none", "loading": loading} | ahead)
    sizes = {"num_kv_blocks": 400, "block_size": 8, "max_model_len": 100, "max_num_batched_tokens": 100}
    return Engine("tiny-llama", RANKS, scheduler="fifo", cache=cache, **sizes, **more)


def answers(served: Engine) -> list[Completion]:
    names: list[str | None] = list(RANKS)
    return served.generate([[5, 6, 7, 8] * 6] * len(names), names, max_tokens=5, temperature=0.0)


def left() -> tuple[int, int]:
    """Return the open descriptors and the children of this process."""
    tasks = Path("/proc/self/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return len(list(Path("/proc/self/fd").iterdir())), len(children)


def soak(strikes: int, every_s: float) -> Counter[str]:
    with engine("resident") as whole:
        expected = [answer.token_ids for answer in answers(whole)]
    seen: Counter[str] = Counter()
    with engine("assisted", copy_gb_per_s=1e-3) as served:
        runner: Any = served.worker.runner
        crew, done = runner.assistance.crew, threading.Event()

        def strike() -> None:
            rng = np.random.default_rng(0)
            while seen["strikes"] < strikes:
                time.sleep(every_s)
                fault = signal.SIGKILL if seen["strikes"] % 2 else signal.SIGSTOP
                with suppress(ProcessLookupError):
                    os.kill(int(rng.choice(crew.pids)), fault)
                    seen["strikes"] += 1
            done.set()

        striker = threading.Thread(target=strike)
        striker.start()
        while not done.is_set():
            began_s = time.monotonic()
            found = answers(served)
            passed_s = time.monotonic() - began_s
            assert [answer.token_ids for answer in found] == expected, "an answer is wrong"
            assert passed_s < LONGEST_S, f"a batch took {passed_s:.1f} s"
            seen["answers"] += len(found)
            seen["longest_ms"] = max(seen["longest_ms"], round(1e3 * passed_s))
        striker.join()
        seen["rounds"] = crew.board.round()
        seen["failed_rounds"], seen["restarts"] = crew.failed_rounds, crew.restarts
    return seen


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--every", dest="every_s", type=float, default=0.5)
    chosen = parser.parse_args()
    soak(1, 0.1)  # libraries open their descriptors once
    gc.collect()
    before = left()
    seen = soak(chosen.strikes, chosen.every_s)
    gc.collect()
    assert left() == before, f"descriptors and children were {before}, and are {left()}"
    print(", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in seen.items()))


if __name__ == "__main__":
    main()
