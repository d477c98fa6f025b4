"""Operating points of the engine, and the stepper that measures them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.engine import Decision, Engine, Request, SamplingParams, StepOutput, StepRecord
from capplan.profiling.server._closed_loop import powers_of_2
from capplan.spec import EngineArgs

MIXED: Final = 0
"""Rank of an operating point with adapters of all ranks."""
_CONTEXTS: Final = (16, 128, 512, 2048, 8192)
_PROMPTS: Final = (16, 64, 256, 1024, 4096)
_RIDGE: Final = 1e-6
Row = dict[str, float]
COUNTS: Final = ("tokens", "requests", "kv_tokens", "adapters", "waiting")
PHASES: Final = ("schedule_ms", "prepare_ms", "sample_ms", "commit_ms", "forward_ms")
_RANK_COLUMNS: Final = (
    *("decodes", "prefills", "lora_decodes", "lora_prefills", "lora_prefill_tokens"),
    *("max_rank", "decode_rank_sum", "prefill_rank_sum", "prefill_rank_tokens"),
)
DECODES: Final = 9
"""Steps per operating point without a prompt."""
PROMPTS: Final = 3
"""Prompts that join the batch, with a decode step between them."""
GROWTH: Final = DECODES + 2 * PROMPTS + 4


@dataclass(frozen=True)
class EnginePoint:
    """Operating point of the engine."""

    batch: int
    """Requests that decode."""
    context: int
    """Approximate tokens of each."""
    prompt: int
    """Tokens of a prompt that joins them in some steps."""
    adapters: int
    """Distinct adapters in the batch; 0: the base model alone."""
    rank: int = MIXED
    """Rank of the adapters, or `MIXED`."""
    waiting: int = 0
    """Queued requests."""

    @property
    def name(self) -> str:
        rank = "mixed" if self.rank == MIXED else str(self.rank)
        return f"b{self.batch}-c{self.context}-p{self.prompt}-a{self.adapters}-r{rank}-w{self.waiting}"


@dataclass(frozen=True)
class EngineBounds:
    """Limits on operating points of an engine."""

    args: EngineArgs
    ranks: tuple[int, ...]
    kv_tokens: int

    def fits(self, point: EnginePoint) -> bool:
        """Return whether a point runs without preemption."""
        longest = max(point.context + GROWTH, point.prompt + 1)
        held = point.batch * (point.context + GROWTH) + point.prompt
        return (
            longest < self.args.max_model_len
            and held <= self.kv_tokens // 2
            and point.batch + point.prompt <= self.args.max_num_batched_tokens
        )

    def shortened(self, point: EnginePoint) -> EnginePoint:
        """Return the point with the longest fitting prompt, up to its own; unchanged if none fits."""
        prompts = (prompt for prompt in reversed(_PROMPTS) if prompt <= point.prompt)
        return next(filter(self.fits, (replace(point, prompt=prompt) for prompt in prompts)), point)


def candidates(bounds: EngineBounds, seed: int) -> list[EnginePoint]:
    """Return the operating points of an engine in a random order.

    Batches and adapters are powers of 2; contexts and prompts grow by factors of 4 and 8. Ranks alternate.
    Full batches are also measured with a queue.
    """
    rng = np.random.default_rng(seed)
    ranks = (*bounds.ranks, MIXED) if len(bounds.ranks) > 1 else bounds.ranks
    slots, seqs = bounds.args.max_loras, bounds.args.max_num_seqs
    most = max(1, seqs - 1)  # a place in the batch is left for the prompt
    found: list[EnginePoint] = []
    for batch in dict.fromkeys(min(batch, most) for batch in powers_of_2(seqs)):
        for context in _CONTEXTS:
            for adapters in (0, *powers_of_2(min(batch, slots))):
                prompt = int(rng.choice(_PROMPTS))
                rank = MIXED if adapters == 0 else int(rng.choice(ranks))
                found.append(bounds.shortened(EnginePoint(batch, context, prompt, adapters, rank)))
    found += [
        EnginePoint(seqs, _CONTEXTS[0], _PROMPTS[0], adapters, MIXED, waiting)
        for adapters in (0, min(slots, seqs))
        for waiting in (seqs, 4 * seqs)
    ]
    kept = [point for point in dict.fromkeys(found) if bounds.fits(point)]
    return [kept[at] for at in rng.permutation(len(kept)).tolist()]


def step_features(point: EnginePoint, mean_rank: float) -> NDArray[np.float64]:
    """Return the features of decode step and mixed step, shape (2, features)."""
    rank = 0.0 if point.adapters == 0 else float(point.rank or mean_rank)
    tokens, ranks = point.batch * point.context, point.batch * rank
    decode = [1.0, point.batch, tokens, point.adapters, ranks, point.waiting]
    return np.array([[*decode, 0.0, 0.0], [*decode, point.prompt, point.prompt * rank]], np.float64)


def most_informative(
    left: Sequence[EnginePoint],
    seen: Sequence[tuple[EnginePoint, float, float]],
    mean_rank: float,
) -> int:
    """Return the index of the unmeasured point with the largest leverage, as in D-optimal designs."""
    features = np.array([step_features(point, mean_rank) for point in left])
    scale = np.maximum(features.max(axis=(0, 1)), 1.0)
    size = scale.size
    information = _RIDGE * np.eye(size)
    rows, times = np.zeros((0, size)), np.zeros(0)
    if seen:
        rows = np.concatenate([step_features(point, mean_rank) for point, _, _ in seen]) / scale
        times = np.array([each for _, decode, mixed in seen for each in (decode, mixed)])
        weighted = rows / times[:, None]
        information = information + weighted.T @ weighted * float(times.min()) ** 2
    scaled = features / scale
    expected = np.ones(scaled.shape[:2])
    if len(times) >= size:
        found = np.linalg.lstsq(rows / times[:, None], np.ones(times.size), rcond=None)[0]
        expected = np.maximum(scaled @ found, float(times.min()) / 2) / float(times.min())
    unknown = np.einsum("psi,ij,psj->ps", scaled, np.linalg.inv(information), scaled) / expected**2
    return int(np.argmax(unknown.max(axis=1)))


def step_row(
    record: StepRecord,
    decision: Decision,
    requests: Mapping[int, Request],
    emitted: Collection[int],
    rank_of: Mapping[int, int],
) -> Row:
    """Return the step-table row of one step."""
    row = dict.fromkeys(_RANK_COLUMNS, 0.0)
    for number, tokens in decision.tokens:
        request = requests[number]
        rank = rank_of.get(request.adapter, 0)
        had_output = len(request.output) > int(number in emitted)
        phase = "decode" if tokens == 1 and had_output else "prefill"
        row[f"{phase}s"] += 1.0
        row["max_rank"] = max(row["max_rank"], float(rank))
        row[f"{phase}_rank_sum"] += rank
        if request.adapter:
            row[f"lora_{phase}s"] += 1.0
            if phase == "prefill":
                row["lora_prefill_tokens"] += tokens
                row["prefill_rank_tokens"] += tokens * rank
    return {
        "step_ms": record.duration_ns * 1e-6,
        **{name: float(getattr(record, name)) for name in COUNTS},
        "load_ms": 0.0,  # adapters are loaded before the measured steps
        **row,
        "prefill_mpairs": record.prefill_pairs * 1e-6,
        **{name: float(getattr(record, name)) for name in PHASES},
    }


def middle(rows: Sequence[Row]) -> Row:
    """Return steps of one point as a row: median times, since disturbances only lengthen steps, and means."""
    return {
        name: float((np.median if name.endswith("_ms") else np.mean)([row[name] for row in rows]))
        for name in rows[0]
    }


class Stepper:
    """Stepper of one engine with a virtual clock, in which adapter loads do not lengthen other steps."""

    def __init__(self, engine: Engine, ranks: dict[str, int], seed: int) -> None:
        self.engine = engine
        self._ranks = ranks
        self._rank_of = {at: ranks[name] for at, name in enumerate(engine.adapters, start=1)}
        self._rng = np.random.default_rng(seed)
        self._requests: dict[int, Request] = {}
        engine.core.decisions = []

    def measure(self, point: EnginePoint) -> list[Row]:
        """Return the rows of a point: the first prompts, decode, and mixed."""
        names = self._names(point)
        self.load(name for name in names if name is not None)
        prefill = self._run_to_decode(self._submit(point.batch, point.context, names, GROWTH))
        self._submit(point.waiting, point.context, names, GROWTH)
        rows = [row for row in prefill if row["decodes"] == 0.0][:1]
        decode = [row for row in (self._step_row() for _ in range(DECODES)) if row["prefills"] == 0.0]
        mixed = []
        for at in range(0 if point.waiting else PROMPTS):
            self._submit(1, point.prompt, names[at % len(names) :], 1)
            row = self._step_row()
            if row["prefills"] == 1.0 and row["decodes"] == point.batch:
                mixed.append(row)
            self._step()
        self._abort()
        return rows + [middle(each) for each in (decode, mixed) if each]

    def iteration_ms(
        self, names: Sequence[str], prompt: int, decodes: int, repeats: int
    ) -> tuple[float, float]:
        """Return median milliseconds of whole iterations: prefill of one prompt per adapter, and decode."""
        self.load(names)
        prefill, decode = [], []
        for _ in range(repeats):
            rows = self._run_to_decode(self._submit(len(names), prompt, names, decodes + 2))
            prefill.append(sum(row["step_ms"] for row in rows))
            decode += [self._step_row()["step_ms"] for _ in range(decodes)]
            self._abort()
        return float(np.median(prefill)), float(np.median(decode))

    def load(self, names: Iterable[str]) -> None:
        """Load adapters, so that no measured step waits for one."""
        for name in dict.fromkeys(names):
            (request,) = self._submit(1, 1, [name], 1)
            while request.finish_reason is None:
                self._step()
        self._clear()

    def _names(self, point: EnginePoint) -> list[str | None]:
        if point.adapters == 0:
            return [None]
        fitting = [name for name, rank in self._ranks.items() if point.rank in (MIXED, rank)]
        if point.rank == MIXED:  # one of each rank in turn
            by_rank = {rank: [n for n in fitting if self._ranks[n] == rank] for rank in self._ranks.values()}
            fitting = [name for turn in zip(*by_rank.values(), strict=True) for name in turn]
        return [fitting[at] for at in range(point.adapters)]

    def _submit(self, count: int, prompt: int, names: Sequence[str | None], output: int) -> list[Request]:
        """Submit requests of random tokens for adapters in turn."""
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        submitted = []
        for at in range(count):
            tokens = self._rng.integers(0, self.engine.config.vocab_size, max(1, prompt)).tolist()
            request = self.engine.new_request(tokens, names[at % len(names)], params)
            self._requests[request.number] = request
            if not self.engine.submit(request):
                raise RuntimeError(f"a request of {prompt} tokens does not fit")
            submitted.append(request)
        return submitted

    def _run_to_decode(self, requests: Sequence[Request]) -> list[Row]:
        rows = []
        while any(not request.output for request in requests):
            rows.append(self._step_row())
        return rows

    def _step(self) -> StepOutput:
        """Run one step, waiting for adapters if necessary."""
        while True:
            step = self.engine.step()
            if step is not None and step.record is not None:
                return step
            if step is None and not self.engine.wait_for_adapter():
                raise RuntimeError("requests wait, but nothing can run")

    def _step_row(self) -> Row:
        step, decisions = self._step(), self.engine.core.decisions
        if step.record is None or not decisions:
            raise RuntimeError("a step left no record")
        emitted = {request.number for request in step.emitted}
        return step_row(step.record, decisions[-1], self._requests, emitted, self._rank_of)

    def _abort(self) -> None:
        for request in self._requests.values():
            self.engine.abort(request)
        self._clear()

    def _clear(self) -> None:
        self._requests.clear()
        self.engine.records.clear()
        self.engine.core.decisions = []
