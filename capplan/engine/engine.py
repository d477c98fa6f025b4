"""The engine from Python: a model, its adapters, and `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.loop import Step
from capplan.engine.lora.sources import AdapterSource, PeftFolder, RandomAdapter
from capplan.engine.models import ModelConfig
from capplan.engine.prefixes import Prefixes
from capplan.engine.records import StepRecord, write_records
from capplan.engine.request import Completion, Request, SamplingParams, Timing
from capplan.engine.settings import EngineSettings
from capplan.engine.setup import build_loop, load_model
from capplan.engine.tokenizer import Tokenizer, load_tokenizer
from capplan.errors import InputError
from capplan.spec.base import unknown_key

Prompt = str | Sequence[int]


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
        self.settings = _settings(settings)
        loaded = load_model(model, self.settings)
        self.config = loaded.config
        self.tokenizer: Tokenizer = load_tokenizer(loaded.folder, loaded.config.vocab_size)
        self.adapters: tuple[str, ...] = tuple(adapters or {})
        sources = [
            _source(at, value, self.settings.seed) for at, value in enumerate((adapters or {}).values())
        ]
        self.loop, self.sizes = build_loop(loaded, sources, self.settings, virtual_time)
        self.records: list[StepRecord] = []
        self._numbers = {name: number for number, name in enumerate(self.adapters, start=1)}
        self._prefixes = Prefixes(self.settings.shared_prefix_tokens)
        self._submitted = 0

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
        params = _params(sampling)
        texts = _as_list(prompts)
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
        if adapter is not None and adapter not in self._numbers:
            raise InputError(
                f"must be one of {', '.join(self.adapters) or 'no adapters'}", adapter, "adapters"
            )
        self._submitted += 1
        seed = [self.settings.seed, self._submitted] if params.seed is None else params.seed
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_ids))
        return Request(
            number=self._submitted,
            adapter=0 if adapter is None else self._numbers[adapter],
            prompt=self._tokens(prompt),
            params=params,
            stop_ids=frozenset(stops),
            arrival_ns=self.loop.clock.now_ns() if arrival_ns is None else arrival_ns,
            rng=np.random.default_rng(seed) if params.temperature > 0 else None,
        )

    def submit(self, request: Request) -> bool:
        """Queue a request; False when the engine is full, or can never run it."""
        prefix, shared = self._prefixes.of(request.prompt)
        return self.loop.submit(request, prefix, shared)

    def step(self) -> Step | None:
        """Run one step; None when there is nothing to run now."""
        step = self.loop.step()
        if step is not None:
            self.records.append(step.record)
        return step

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
            adapter=self.adapters[request.adapter - 1] if request.adapter else None,
            finish_reason=request.finish_reason or "abort",
            timing=Timing(
                arrival_s=request.arrival_ns * 1e-9,
                admitted_s=(request.admitted_ns or request.arrival_ns) * 1e-9,
                first_token_s=times[0],
                finish_s=times[-1],
                token_s=tuple(times),
            ),
            preemptions=request.preemptions,
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


def _settings(fields: Mapping[str, Any]) -> EngineSettings:
    _require_fields(EngineSettings, fields)
    return EngineSettings(**fields)


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    _require_fields(SamplingParams, fields)
    return SamplingParams(**fields)


def _require_fields(kind: type[EngineSettings] | type[SamplingParams], fields: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise InputError(unknown_key(name, names), location=name)


def _source(at: int, value: str | Path | int, seed: int) -> AdapterSource:
    if isinstance(value, int):
        if not 1 <= value <= 512:
            raise InputError("must be a rank from 1 to 512, or a folder", value, "adapters")
        return RandomAdapter(value, seed + 1 + at)
    return PeftFolder(Path(value))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
