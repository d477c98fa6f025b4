"""Fit the host terms of composed profiles to measured engines, by engine version.

    python -m benchmarks.fit_host_terms [--data FOLDER] [-o datasets/composed/host_terms.json]

Milliseconds per step and per running request are those with the least squared relative error of the simulated
mean inter-token latency; milliseconds outside steps are the median difference of TTFT, where clients send at
given times from outside. Other versions than 0.15.1 have few GPUs and models: their terms are drawn towards
those of 0.15.1 by a normal prior (`benchmarks.measured.host_terms`), and their scatter is at least its.
Rows are left out in turn, by GPU, model and tensor parallelism as far as a version has several, else one by
one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import command_line, user_errors
from benchmarks.measured import dense_stages, request_logs, silicon_vllm, vllm_023
from benchmarks.measured.case import Deployment, LeftOut, MeasuredCase, data_folder
from benchmarks.measured.host_terms import Rows, fitted
from capplan import InputError, Profile
from capplan.models.compose import compose_profile, known_decoder, layer_times, profile_of_times
from capplan.models.compose._profile import FILE, FittedTerms, HostTerms, LeftOutError
from capplan.serving import rules_of_version
from capplan.spec import write_text_atomic

Floats = NDArray[np.float64]

LAYERS_GPU: Final = "rtx-4090"
LAYERS_MODEL: Final = "Llama-3.1-8B"
LAYERS_FOLDER: Final = "layers_rtx4090"

_LEFT_OUT: Final = ("gpu", "model", "tp", "name")


@dataclass(frozen=True)
class Source:
    """Measured rows of one engine version."""

    version: str
    words: str
    read: Callable[[Path], Sequence[MeasuredCase]]
    is_open_loop: bool = True
    """Whether clients send at given times from outside, so that TTFT shows the time outside steps."""
    dtype: str = "bfloat16"


SOURCES: Final = (
    Source("0.15.1", "28 load stages of inference-sim/sim-to-real-accuracy-validation", dense_stages.read),
    Source("0.12.0", "closed-loop rows of Qwen3-32B of ai-dynamo/aiconfigurator", silicon_vllm.read, False),
    Source(
        "0.19.0", "300 requests of casys-kaist/LLMServingSim on an RTX PRO 6000", request_logs.read, False
    ),
    Source("0.23.0", "four rates of inference-sim/residency-vllm", vllm_023.read),
)


@functools.cache
def bare_profile(where: Deployment, _left_out: LeftOut | None = None) -> Profile:
    """Return the composed profile of a deployment without host terms."""
    decoder = known_decoder(where.model, where.dtype or None, where.kv_cache_dtype)
    none = HostTerms(
        engine_version=where.version,
        dtype=where.dtype,
        base_ms=0.0,
        ms_per_request=0.0,
        request_ms=0.0,
        std_errors=(0.0, 0.0),
        source="none",
        rows=1,
        error_percent=0.0,
        scatter=0.0,
    )
    return compose_profile(
        where.gpu,
        decoder,
        rules_of_version(where.version),
        where.version,
        tp=where.tp,
        expert_parallel=where.expert_parallel,
        terms=none,
    )


def rows_of(source: Source, folder: Path) -> Rows:
    """Return the rows of a source that a composed profile exists for."""
    found = []
    for case in source.read(folder):
        if (case.deployment.version, case.deployment.dtype) == (source.version, source.dtype):
            try:
                bare_profile(case.deployment)
            except InputError as error:
                print(f"not composed: {case.name}: {error}", file=sys.stderr)
                continue
            found.append(case)
    return Rows.of(found, bare_profile)


def groups(rows: Rows, key: str) -> dict[str, list[int]]:
    """Return positions of rows by the value of a key."""
    found: dict[str, list[int]] = {}
    for i, case in enumerate(rows.cases):
        value = case.name if key == "name" else str(getattr(case.deployment, key))
        found.setdefault(value, []).append(i)
    return found


def fit(source: Source, folder: Path, reference: HostTerms | None = None) -> HostTerms:
    """Return the terms of a source with their errors; `reference` is the one with most GPUs and models."""
    rows = rows_of(source, folder)
    prior = None
    if reference is not None:
        prior = np.array([reference.base_ms, reference.ms_per_request, reference.request_ms])
    terms, std_errors = fitted(rows, prior)
    if prior is not None and not source.is_open_loop:
        terms[2] = prior[2]
    errors = rows.errors(terms)
    left_out: list[LeftOutError] = []
    left_errors: list[Floats] = []
    for key in _LEFT_OUT if len(rows.cases) > 1 else ():
        by_value = groups(rows, key)
        if len(by_value) < 2 or (key == "name" and left_out):
            continue
        for value, out in by_value.items():
            those = rows.only(out).errors(fitted(rows.without(out), prior)[0])
            left_errors.append(those)
            percent = round(100.0 * float(np.mean(np.abs(those))), 2)
            left_out.append(LeftOutError(left_out=f"{key} {value}", rows=len(out), error_percent=percent))
            print(f"  {source.version}: left out {key} {value}: {percent} %", file=sys.stderr)
    late = rows.errors(terms, "ttft_ms")
    print(f"  TTFT {100 * np.mean(np.abs(late)):.1f} %", file=sys.stderr)
    scatter = 0.0 if reference is None else reference.scatter
    if left_errors:
        scatter = max(scatter, float(np.sqrt(np.mean(np.square(np.concatenate(left_errors))))))
    return HostTerms(
        engine_version=source.version,
        dtype=source.dtype,
        base_ms=round(float(terms[0]), 4),
        ms_per_request=round(float(terms[1]), 5),
        request_ms=round(float(terms[2]), 2),
        std_errors=(round(float(std_errors[0]), 4), round(float(std_errors[1]), 5)),
        source=f"{source.words} (vLLM {source.version})",
        rows=len(rows.cases),
        error_percent=round(100.0 * float(np.mean(np.abs(errors))), 2),
        left_out=tuple(left_out),
        scatter=round(scatter, 4),
    )


def of_layers(folder: Path, reference: HostTerms) -> HostTerms:
    """Return the terms that go with measured layers, which hold the starts of kernels and the sampler: none.

    The error is that on the requests of the same server, which nothing was fitted to.
    """
    case = next(each for each in request_logs.read(folder) if each.deployment.gpu == LAYERS_GPU)
    where = case.deployment
    terms = HostTerms(
        engine_version=where.version,
        dtype=where.dtype,
        parts="layers",
        base_ms=0.0,
        ms_per_request=0.0,
        request_ms=reference.request_ms,
        std_errors=(0.0, 0.0),
        source=f"300 requests of LLMServingSim on an RTX 4090 (vLLM {where.version})",
        only_for=f"{LAYERS_GPU} {LAYERS_MODEL}",
        rows=1,
        error_percent=0.0,
        scatter=reference.scatter,
    )
    decoder = known_decoder(where.model, where.dtype or None, where.kv_cache_dtype)
    times = layer_times(folder / LAYERS_FOLDER, where.gpu, decoder)
    profile = profile_of_times(times, rules_of_version(where.version), where.version, terms=terms)
    error = abs(case.predict(profile)["tpot_ms"] / case.measured["tpot_ms"] - 1.0)
    return terms.replace(error_percent=round(100.0 * error, 2))


def main() -> None:
    """Fit the terms of every source."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured data")
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    args = parser.parse_args()
    with user_errors():
        folder = data_folder(args.data)
        found: list[HostTerms] = []
        for source in SOURCES:
            found.append(fit(source, folder, found[0] if found else None))
            print(found[-1].model_dump_json(), file=sys.stderr)
        found.append(of_layers(folder, found[0]))
    found.sort(key=lambda each: tuple(int(part) for part in each.engine_version.split(".")))
    write_text_atomic(args.output, FittedTerms(terms=tuple(found)).model_dump_json(indent=2) + "\n")


if __name__ == "__main__":
    main()
