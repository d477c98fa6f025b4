"""Steps and adapter copies: a copy waits for earlier steps, no step for a copy that it does not need."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capplan.engine import Engine, SamplingParams
from capplan.engine._sampler import Sampled, TokenCopies
from capplan.engine.lora._loader import CopyStream, CudaCopyStream
from tests.engine.engines import TINY_MODEL, TimedRequest, replay

ADAPTERS = {"a": 3, "b": 8, "c": 5}
SMALL = {"num_kv_blocks": 80, "block_size": 4, "max_num_seqs": 8, "max_loras": 2, "max_cpu_loras": 2}


class Recorder(CopyStream):
    """Events of an engine in their order; copies wait for a gate."""

    def __init__(self, engine: Engine) -> None:
        self.log: list[tuple[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._fences = itertools.count()
        core = engine.core
        run, place = core.runner.run, core.lora.place

        def recorded_run(step: Any) -> torch.Tensor:
            self.log.append(("step", {segment.adapter for segment in step.segments}))
            return run(step)

        def recorded_place(number: int, *given: Any) -> None:
            self.log.append(("place", number))
            place(number, *given)

        core.runner.run, core.lora.place = recorded_run, recorded_place  # type: ignore[method-assign]
        core.lora.copies = self

    def fence(self) -> int:
        fence = next(self._fences)
        self.log.append(("fence", fence))
        return fence

    @contextlib.contextmanager
    def copying(self, after: int, size_bytes: int = 0) -> Iterator[None]:
        self.log.append(("copy", after))
        assert self.gate.wait(20)
        yield
        self.log.append(("end", after))

    def check(self) -> int:
        """Check the order of all events; return the number of copies."""
        fence_of: dict[int, int] = {}
        ended: set[int] = set()
        at = {event: index for index, event in enumerate(self.log) if event[0] in ("fence", "copy", "end")}
        for (kind, value), (_, following) in itertools.pairwise([*self.log, ("", None)]):
            if kind == "place":
                fence_of[value] = following  # the fence is set right after the adapter has its memory
            elif kind == "end":
                ended.add(value)
            elif kind == "step":
                assert {fence_of[adapter] for adapter in value - {0}} <= ended
        for fence in fence_of.values():
            assert at["fence", fence] < at["copy", fence] < at["end", fence]
        return len(ended)


@pytest.mark.parametrize("rules", ["capplan", "vllm-0.11", "slora", "chameleon"])
@pytest.mark.parametrize("virtual", [False, True], ids=["thread", "virtual"])
def test_adapters_are_copied_after_earlier_steps_and_before_their_own(rules: str, virtual: bool) -> None:
    options = {**SMALL, "rules": rules}
    if rules in ("slora", "chameleon"):
        options["max_cpu_loras"] = 3
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    names = [*"abcbca", None, *"cab"]
    arrivals = [TimedRequest(i * 300_000, [1, 2, i], name, params) for i, name in enumerate(names)]
    with Engine(TINY_MODEL, ADAPTERS, virtual_time=virtual, **options) as engine:
        recorder = Recorder(engine)
        assert None not in replay(engine, arrivals)
    assert recorder.check() >= 3


def test_other_requests_run_during_a_copy() -> None:
    with Engine(TINY_MODEL, ADAPTERS, rules="capplan", **SMALL) as engine:
        recorder = Recorder(engine)
        recorder.gate.clear()
        base, own = (
            engine.new_request([1, 2], name, SamplingParams(max_tokens=tokens, ignore_eos=True))
            for name, tokens in ((None, 6), ("a", 2))
        )
        assert engine.submit(own)
        assert engine.submit(base)
        while base.finish_reason is None:
            assert engine.step() is not None
        assert (len(base.output), len(own.output)) == (6, 0)
        recorder.gate.set()
        while own.finish_reason is None:
            if engine.step() is None:
                assert engine.wait_for_adapter()
        assert recorder.check() == 1


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the calls of a fake of CUDA in their order; events are numbered."""
    calls: list[tuple[Any, ...]] = []

    class Stream:
        device = "cuda"

        def __init__(self, *_: Any) -> None:
            calls.append(("stream",))

        def wait_event(self, event: Any) -> None:
            calls.append(("wait", event.number))

    class Event:
        numbers = itertools.count()

        def __init__(self, blocking: bool = False) -> None:
            self.number, self.blocking = next(self.numbers), blocking

        def record(self, stream: Any) -> None:
            calls.append(("record", self.number, "copies" if isinstance(stream, Stream) else stream))

        def synchronize(self) -> None:
            calls.append(("synchronize", self.number, self.blocking))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda own, _: calls.append(("keep", own.tolist())))
    return calls


def test_a_gpu_copies_on_one_stream_between_two_events(cuda_calls: list[tuple[Any, ...]]) -> None:
    copies = CudaCopyStream(torch.device("cuda"))
    for _ in range(2):
        fence = copies.fence()
        with copies.copying(fence):
            cuda_calls.append(("copy",))
    expected: list[tuple[Any, ...]] = [("stream",)]
    for first in (0, 2):
        expected += [("record", first, "compute"), ("wait", first), ("copy",)]
        expected += [("record", first + 1, "copies"), ("synchronize", first + 1, True)]
    assert cuda_calls == expected


def test_the_host_waits_for_the_copy_of_tokens_alone(cuda_calls: list[tuple[Any, ...]]) -> None:
    """The copy waits for the sampler, on a stream of its own."""
    fetched = TokenCopies(torch.device("cuda")).begin(Sampled(torch.tensor([3]), torch.tensor([True])))
    kept = [("keep", [3]), ("keep", [True])]
    begun = [("stream",), ("record", 0, "compute"), ("wait", 0), *kept, ("record", 1, "copies")]
    assert cuda_calls == begun
    assert [each.tolist() for each in fetched()[:2]] == [[3], [True]]
    assert cuda_calls[-1][:2] == ("synchronize", 1)
