"""Adapters as the loop sees them: who is known, who is loaded for a step, who has arrived, who must go."""

from __future__ import annotations

from capplan.engine.clock import Clock
from capplan.engine.lora.loader import Arrival, Loader
from capplan.engine.lora.residency import Residency
from capplan.engine.lora.sources import AdapterSource
from capplan.engine.stopwatch import Stopwatch
from capplan.engine.withdraw import forget_adapter
from capplan.serving import Limits, State, adapter_loaded
from capplan.serving import state as s
from capplan.serving.state import SLORA


class Loads:
    """The adapters of one engine instance: what the scheduler says of them, carried out and reported back."""

    def __init__(
        self, state: State, limits: Limits, residency: Residency, loader: Loader, clock: Clock
    ) -> None:
        self.residency = residency
        self.loader = loader
        self._state = state
        self._clock = clock
        self._slora = limits.policy == SLORA
        self._beside = bool(limits.load_beside)

    def add(self, number: int, source: AdapterSource, max_rank: int) -> None:
        """Take an adapter in; the first request of it loads it."""
        self.residency.enter(number, source, max_rank)
        self.tell_pages(number)

    def tell_pages(self, number: int) -> None:
        """Tell the scheduler how many pages a new adapter takes, if it counts them."""
        if self._slora:
            self._state.adapters.pages[number] = self.residency.pages(number)

    def remove(self, number: int) -> None:
        """Drop an adapter, which no request in flight may have."""
        if self._state.adapters.claim[number] == s.LOADING:  # for a request that is gone
            self.loader.recall(number)
            adapter_loaded(self._state, number)
        self.loader.wait(number)
        forget_adapter(self._state, number)
        self.residency.leave(number)
        self._state.adapters.pages[number] = 0

    def forget(self, number: int) -> None:
        """Have an adapter that could not be loaded loaded anew when it is asked for again."""
        forget_adapter(self._state, number)
        self.residency.drop(number)

    def arrived(self) -> list[Arrival]:
        """Return the loads beside the batch that have ended; the scheduler is to be told with `accept`."""
        return self.loader.arrived()

    def accept(self, arrival: Arrival) -> None:
        """Tell the scheduler of a load that has ended; if it went wrong, no request may want it any more."""
        adapter_loaded(self._state, arrival.adapter)
        if arrival.error is not None:
            self.forget(arrival.adapter)

    def run(self, watch: Stopwatch) -> dict[int, str]:
        """Begin the loads of this step, do those that it has to wait for, and return what went wrong."""
        state = self._state
        errors: dict[int, str | None] = {}
        if self._slora or state.counters[s.N_LOADS] > 0:
            for adapter, job in self.residency.follow(state, self.loader.wait):
                if self._beside or self._slora:
                    watch.lap("load")
                    self.loader.begin(adapter, job, announce=self._beside)
                    watch.skip()
                else:
                    errors[adapter] = job()
        watch.lap("load")
        if self._slora:  # a batch of prompts waits until all of its adapters are there
            admitted = state.lists.admitted[: state.counters[s.N_ADMITTED]]
            for adapter in set(state.rows.adapter[admitted].tolist()) - {0}:
                ready_ns = self.loader.ready_ns(adapter)
                errors[adapter] = self.loader.wait(adapter)
                watch.lap("load")
                watch.until("load", ready_ns - self._clock.now_ns())
        return {adapter: error for adapter, error in errors.items() if error is not None}
