"""Memory of the largest step, measured before KV pages are allocated, as by vLLM's ``profile_run``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capplan.engine._input_batch import Segment, StepInputs
from capplan.engine._pool import NULL_PAGE
from capplan.engine._request import Request, SamplingParams
from capplan.engine._sampler import sample
from capplan.spec import EngineArgs

_LOGPROBS: Final = 5


def largest_step(args: EngineArgs, block_size: int, dump_page: int, adapter: int) -> StepInputs:
    """Return the step with the most tokens, requests and context.

    One prompt takes what decodes leave of `max_num_batched_tokens`; several do if it is longer than
    `max_model_len`. All contexts have that length. They are read from the null page and written to the dump
    page, so the step needs no KV of its own.

    Parameters
    ----------
    adapter
        Of all tokens; 0: the base model.
    """
    longest = args.max_model_len
    tokens = max(args.max_num_batched_tokens, args.max_num_seqs)
    prompts = min(args.max_num_seqs, -(-tokens // longest))
    decodes = args.max_num_seqs - prompts
    prompt_tokens = min(tokens - decodes, prompts * longest)
    ends = decodes + np.arange(1, prompts + 1) * prompt_tokens // prompts
    spans = list(zip([decodes, *ends.tolist()], ends.tolist(), strict=False))
    total = decodes + prompt_tokens
    columns = np.zeros((4, total), np.int64)
    columns[1] = longest - 1
    columns[2] = dump_page
    blocks = -(-longest // block_size)
    at = np.arange(decodes)
    return StepInputs(
        columns=columns,
        new_pages=np.zeros(0, np.int64),
        decodes=np.stack([at, np.full(decodes, longest)]),
        tables=np.full((decodes, blocks), NULL_PAGE),
        prefills=tuple((start, end, longest, np.full(blocks, NULL_PAGE)) for start, end in spans),
        segments=(Segment(adapter, 0, total),),
        sampled=np.concatenate([at, ends - 1]),
    )


def sample_largest(logits: torch.Tensor) -> None:
    """Sample a token per row, every one with a temperature, top-p and log-probabilities."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=_LOGPROBS)
    prompt, rng = np.zeros(1, np.int32), np.random.default_rng(0)
    request = Request(0, 0, None, 0, prompt, params, frozenset(), arrival_ns=0, rng=rng)
    requests = [request] * logits.shape[0]
    sample(logits, requests, np.ones(len(requests), np.int64))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that PyTorch's operators allocate on a CPU, which does not count them.

    Attributes
    ----------
    live_bytes, peak_bytes
        Of storages that were allocated within the mode and are still referenced, and the most of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._known.add(storage)  # of a tensor that is older than the mode
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _storages(tree: Any) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most bytes that a function holds at once on a device, beyond those held before it."""
    if device.type != "cuda":
        counted = LiveBytes()
        with counted:
            run()
        return counted.peak_bytes
    free_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before_bytes


def held_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the bytes that a function leaves allocated on a device."""
    if device.type != "cuda":
        counted = LiveBytes()
        with counted:
            run()
        return counted.live_bytes
    before_bytes = used_bytes(device)
    run()
    return used_bytes(device) - before_bytes


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use: by this process, its libraries, and others."""
    free_unused(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def free_unused(device: torch.device) -> None:
    """Return the memory of unreferenced tensors to a GPU; parts of a closed engine refer to each other."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
