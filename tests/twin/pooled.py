"""Small random scenarios under the rules for one pool: tight memory, wrong predictions, coinciding clocks."""

import numpy as np
from hypothesis import strategies as st

from capplan.serving.pooled import PoolSetup
from capplan.serving.pooled import _state as p
from capplan.spec import MOST_QUEUES, QueueClass, Queues, Scheduler, Wrs
from capplan.twin import Scenario
from capplan.twin.instance._assist import NO_ASSIST, CpuAssist
from capplan.twin.instance._scenario import NS_PER_MS
from tests.serving.pooled_worlds import make_pooled_limits
from tests.serving.worlds import Choose, seeded
from tests.twin.scenarios import make_scenario

QUEUE_CUTS = (0.1, 0.3, 0.6)


def with_period(scheduler: Scheduler, period_s: float) -> Scheduler:
    """Return a scheduler with another time between refreshes, also one too short for a document."""
    return scheduler.model_copy(update={"refresh_s": period_s})


def make_pooled(choose: Choose, max_requests: int = 40) -> Scenario:
    """Return a scenario; times are small multiples of 1 ms."""
    base = make_scenario(choose, max_requests)
    adapters = base.adapters
    pages = np.array([0, *(choose(1, 5) for _ in range(adapters))], np.int64)
    block_size = base.limits.block_size
    num_blocks = int(pages.max()) + choose(4, 40)
    batch = choose(1, 9), choose(2, 40)
    limits = make_pooled_limits(choose, adapters, block_size, num_blocks, batch)._replace(
        ageing_ns=choose(0, 1) * choose(1, 100) * NS_PER_MS,
        # With a short period, requests are soon overdue, and none may bypass them.
        refresh_ns=(choose(20, 500) if choose(0, 2) == 0 else 10_000) * NS_PER_MS,
    )
    requests = base.requests
    outputs = requests.output_tokens
    predicted = np.array([choose(1, 2 * int(tokens)) if choose(0, 1) else tokens for tokens in outputs])
    size_bytes = 100 * pages[1:] + choose(0, 99)
    refreshed = choose(0, 1)
    if limits.order == p.FIFO and limits.loading == p.RESIDENT:
        limits = limits._replace(**_make_merging(choose))
    return base._replace(
        requests=requests._replace(predicted_tokens=predicted.astype(np.int32)),
        limits=limits,
        num_blocks=num_blocks,
        costs=base.costs._replace(
            pages=pages,
            disk_ns=np.zeros_like(pages),
            assist=_make_assist(choose, adapters) if limits.loading == p.ASSISTED else NO_ASSIST,
        ),
        pool=PoolSetup(
            adapter_pages=pages,
            adapter_bytes=np.append(size_bytes.min(), size_bytes),
            adapter_tokens=pages * block_size * choose(0, 1),
            load_ns=base.costs.load_ns,
            weights=(0.45, 0.1, 0.45),
            queues=_queues(choose, num_blocks * block_size) if limits.order == p.QUEUES else None,
            shares_charge=bool(choose(0, 1)),
        ),
        scheduler=with_period(Scheduler(policy="chameleon"), limits.refresh_ns / 1e9) if refreshed else None,
    )


def _make_merging(choose: Choose) -> dict[str, int]:
    """Return dLoRA's times, or none."""
    merged_ms = choose(-10, 20)
    if merged_ms <= 0:
        return {}
    times_ms = merged_ms, merged_ms + choose(1, 20), choose(0, 20)
    return dict(
        zip(("merged_ns", "unmerged_ns", "switch_ns"), (t * NS_PER_MS for t in times_ms), strict=True)
    )


def _make_assist(choose: Choose, adapters: int) -> CpuAssist:
    return CpuAssist(
        layers=choose(1, 8),
        workers=choose(1, 4),
        tokens_per_task=choose(1, 8),
        base_ns=choose(0, 3) * NS_PER_MS // 10,
        signal_ns=choose(0, 3) * NS_PER_MS // 10,
        token_ns=np.array([0.0, *(choose(0, 30) * NS_PER_MS / 100 for _ in range(adapters))]),
        modules=np.array([0, *(choose(1, 4) for _ in range(adapters))]),
    )


def _queues(choose: Choose, tokens: int) -> Queues | None:
    count = choose(0, min(MOST_QUEUES, tokens))
    if count == 0:
        return None
    quotas = [tokens // count] * (count - 1)
    return Queues(
        wrs=Wrs(a=0.4, b=0.6, max_prompt_tokens=24, max_output_tokens=18, max_adapter_bytes=600),
        classes=tuple(
            QueueClass(upper_wrs=upper, quota_tokens=max(1, quota))
            for upper, quota in zip(
                [*QUEUE_CUTS[: count - 1], None], [*quotas, tokens - sum(quotas)], strict=True
            )
        ),
    )


@st.composite
def pooled_scenarios(draw: st.DrawFn) -> Scenario:
    """Return a strategy of scenarios."""
    return make_pooled(lambda low, high: draw(st.integers(low, high)))


def seeded_pooled(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    return make_pooled(seeded(seed))
