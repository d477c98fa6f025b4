"""Idle answers: what they say of loads, whatever else made an answer longer."""

import asyncio
from typing import cast

import pytest

from capplan.profiling.load.record import FINISHED, REFUSED, UNFINISHED, RequestOutcome
from capplan.profiling.server.closed_loop import (
    ClosedLoopRequest,
    LoopError,
    RequestSender,
    adapter_loads,
    first_tokens,
)


class Server:
    """Answers after the times given, in turn."""

    def __init__(self, *ttft_s: float, kind: str = FINISHED) -> None:
        self.ttft_s, self.kind, self.asked = ttft_s, kind, 0

    async def ask(self, model: int, prompt_tokens: int, output_tokens: int) -> ClosedLoopRequest:
        after_s = self.ttft_s[self.asked % len(self.ttft_s)]
        self.asked += 1
        return ClosedLoopRequest(
            RequestOutcome(0, self.kind, 0.0, 2.0, [after_s, 2.0]), model, prompt_tokens, output_tokens
        )


def loads(server: Server) -> list[dict[str, float | str]]:
    adapters = {1: 8, 2: 8, 3: 16, 4: 8}
    return asyncio.run(adapter_loads(cast(RequestSender, server), adapters, 2, 16, 3, lambda: None))


def test_a_load_is_how_much_longer_the_first_answer_took() -> None:
    rows = loads(Server(0.030, 0.010))
    assert {row["rank"]: row["ms"] for row in rows} == {8.0: pytest.approx(20.0), 16.0: pytest.approx(20.0)}


def test_a_load_that_nobody_could_tell_is_kept_with_a_time_that_calibration_takes() -> None:
    rows = loads(Server(0.010, 0.012))
    assert {row["rank"] for row in rows} == {8.0, 16.0}
    assert all(0.0 < float(row["ms"]) < 0.01 for row in rows)


def test_a_request_that_fails_is_an_error_and_one_that_was_cancelled_a_cancellation() -> None:
    for kind, error in ((REFUSED, LoopError), (UNFINISHED, asyncio.CancelledError)):
        with pytest.raises(error):
            asyncio.run(first_tokens(cast(RequestSender, Server(0.01, kind=kind)), [0], [8], 1, lambda: None))
