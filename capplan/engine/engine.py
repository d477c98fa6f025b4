"""The engine from Python: a model, its adapters, and `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.arguments import Prompt, adapter_source, as_list, engine_settings, sampling_params
from capplan.engine.integrity import check_loop
from capplan.engine.loop import Step
from capplan.engine.models import ModelConfig
from capplan.engine.prefixes import Prefixes
from capplan.engine.records import StepRecord, write_records
from capplan.engine.registry import Registry
from capplan.engine.request import Completion, FinishReason, Request, SamplingParams, Timing
from capplan.engine.setup import build_loop, load_model
from capplan.engine.tokenizer import Tokenizer, load_tokenizer
from capplan.errors import InputError


class Engine:
    """A model that serves many LoRA adapters.

    Parameters
    ----------
    model
        A Hugging Face folder (``config.json`` and safetensors); or, with random weights, a ``config.json``,
        the name of a built-in model, or a `ModelConfig`.
    adapters
        Name to a folder that PEFT wrote, or to the rank of a random adapter.
    virtual_time
        Time by which requests arrive passes in steps only; see `capplan.engine.clock`.
    settings
        The fields of `EngineSettings`, such as ``a_max``, ``s_max``, ``dtype``, ``device`` and ``rules``.

    Examples
    --------
    >>> from capplan.engine import Engine
    >>> engine = Engine("tiny-llama", adapters={"support": 8, "legal": 16}, num_kv_blocks=64)
    >>> [len(c.token_ids) for c in engine.generate(["Hello", "Dear"], adapters=["legal", None], max_tokens=4)]
    [4, 4]
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        adapters: Mapping[str, str | Path | int] | None = None,
        *,
        virtual_time: bool = False,
        **settings: Any,
    ) -> None:
        self.settings = engine_settings(settings)
        loaded = load_model(model, self.settings)
        self.config = loaded.config
        self.folder = loaded.folder
        self.tokenizer: Tokenizer = load_tokenizer(loaded.folder, loaded.config.vocab_size)
        self._registry = Registry(self.settings.adapter_capacity(len(adapters or {})))
        sources = [
            adapter_source(value, self.settings.seed + self._registry.add(name))
            for name, value in (adapters or {}).items()
        ]
        self.loop, self.sizes = build_loop(loaded, sources, self.settings, virtual_time)
        self.records: list[StepRecord] = []
        self._prefixes = Prefixes(self.settings.shared_prefix_tokens)
        self._submitted = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may ask for."""
        return self._registry.names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread that loads adapters."""
        self.loop.loader.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer prompts and return the answers in their order.

        Parameters
        ----------
        prompts
            Texts or lists of token ids; a single one counts as a list of one.
        adapters
            The adapter of each prompt, or one for all; None is the base model.
        sampling
            The fields of `SamplingParams`, such as ``max_tokens``, ``temperature``, ``seed``, ``logprobs``.

        Raises
        ------
        InputError
            For an unknown adapter or setting, or a prompt that is empty, too long, or not of the vocabulary.
        """
        params = sampling_params(sampling)
        texts = as_list(prompts)
        names = [adapters] * len(texts) if adapters is None or isinstance(adapters, str) else list(adapters)
        if len(names) != len(texts):
            raise InputError(f"must be one per prompt, {len(texts)}", len(names), "adapters")
        requests = [self.new_request(text, name, params) for text, name in zip(texts, names, strict=True)]
        for request in requests:
            if not self.loop.ever_runs(request):
                rule = f"must fit beside its adapter into {self.sizes.num_blocks} pages, and into one step"
                raise InputError(rule, request.prompt.size, "prompt tokens")
        self._run(requests)
        return [self.completion(request) for request in requests]

    def new_request(
        self, prompt: Prompt, adapter: str | None, params: SamplingParams, arrival_ns: int | None = None
    ) -> Request:
        """Return a checked request, not yet submitted."""
        number = self._registry.number(adapter)
        self._submitted += 1
        seed = [self.settings.seed, self._submitted] if params.seed is None else params.seed
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_ids))
        return Request(
            number=self._submitted,
            adapter=number,
            adapter_name=adapter,
            adapter_entry=self._registry.entry(number),
            prompt=self._tokens(prompt),
            params=params,
            stop_ids=frozenset(stops),
            arrival_ns=self.loop.clock.now_ns() if arrival_ns is None else arrival_ns,
            rng=np.random.default_rng(seed) if params.temperature > 0 else None,
        )

    def submit(self, request: Request) -> bool:
        """Queue a request; False when the engine is full, or can never run it.

        Raises
        ------
        InputError
            When its adapter has been removed since the request was made.
        """
        if self._registry.entry(request.adapter) != request.adapter_entry:
            raise InputError("must not have been removed", request.adapter_name, "adapter")
        prefix, shared = self._prefixes.of(request.prompt, request.adapter)
        return self.loop.submit(request, prefix, shared)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request that runs or waits, and free at once what it holds; nothing if it is over."""
        self.loop.abort(request.number, reason)

    def step(self) -> Step | None:
        """Run one step; None when there is nothing to run now."""
        step = self.loop.step()
        if step is not None:
            for request in step.finished:
                if request.finish_reason == "error":
                    self._prefixes.renew(request.adapter)
            if step.record is not None:
                self.records.append(step.record)
        return step

    def add_adapter(self, name: str, source: str | Path | int) -> None:
        """Make an adapter known: a folder that PEFT wrote, or the rank of a random one.

        Only shapes and ranks are read now; the first request of it loads the adapter.

        Raises
        ------
        InputError
            When the name is taken, there are `max_adapters` already, or the adapter cannot be read, does not
            go with the model, or has a rank above S_max. The engine goes on as if nothing had been asked.
        """
        number = self._registry.add(name)
        try:
            seed = self.settings.seed + self._registry.entry(number)
            self.loop.loads.add(number, adapter_source(source, seed), self.sizes.s_max)
        except InputError:
            self._registry.remove(name)
            raise

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and free what it holds.

        Raises
        ------
        InputError
            When there is none of that name, or requests in flight still use it.
        """
        number = self._registry.number(name)
        users = sum(request.adapter == number for request in self.loop.requests.values())
        if users:
            rule = f"must not be in use: {users} requests of it are in flight"
            raise InputError(rule, name, "adapter")
        self.loop.loads.remove(number)
        self._registry.remove(name)
        self._prefixes.renew(number)

    def check_integrity(self) -> None:
        """Recount requests, pages and slots between two steps, for tests; see `capplan.engine.integrity`."""
        check_loop(self.loop)

    def write_records(self, path: str | Path) -> None:
        """Write what every step did as Parquet."""
        write_records(path, self.records)

    def completion(self, request: Request) -> Completion:
        """Return the answer to a request that has finished."""
        tokens = tuple(request.output)
        ends = request.finish_reason == "stop" and tokens[-1] in request.stop_ids
        times = [ns * 1e-9 for ns in request.token_ns] or [self.loop.clock.now_ns() * 1e-9]
        return Completion(
            prompt_token_ids=tuple(request.prompt.tolist()),
            token_ids=tokens,
            text=self.tokenizer.decode(tokens[:-1] if ends else tokens),
            adapter=request.adapter_name,
            finish_reason=request.finish_reason or "abort",
            timing=Timing(
                arrival_s=request.arrival_ns * 1e-9,
                admitted_s=(request.admitted_ns or request.arrival_ns) * 1e-9,
                first_token_s=times[0],
                finish_s=times[-1],
                token_s=tuple(times),
            ),
            preemptions=request.preemptions,
            error=request.error,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            logits=torch.stack(request.logits) if request.logits else None,
        )

    def _run(self, requests: Sequence[Request]) -> None:
        """Submit requests as there is room, and step until all of them have finished."""
        upcoming = 0
        while upcoming < len(requests) or any(request.finish_reason is None for request in requests):
            while upcoming < len(requests) and self.loop.has_room:
                self.submit(requests[upcoming])
                upcoming += 1
            if self.step() is None and not self.wait_for_adapter():
                raise RuntimeError("requests wait, but nothing can run")

    def wait_for_adapter(self) -> bool:
        """Wait for an adapter that is loaded beside the batch; False when none is."""
        ready_ns = self.loop.loader.next_ns(timeout_s=60.0)
        if ready_ns is None:
            return False
        self.loop.clock.sleep_until(ready_ns)
        return True

    def _tokens(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError("must be text or token ids, not empty", prompt, "prompt")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise InputError(f"must be token ids below {self.config.vocab_size}", int(ids.max()), "prompt")
        if ids.size >= self.sizes.max_model_len:
            raise InputError(
                f"must be below max_model_len, {self.sizes.max_model_len}", ids.size, "prompt tokens"
            )
        return ids.astype(np.int32)
