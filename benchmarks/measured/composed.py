"""Composed profiles: with the host terms that ship, or with terms fitted without the rows left out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from benchmarks.fit_host_terms import bare_profile
from benchmarks.measured.case import SLORA, UNRECORDED, Deployment, LeftOut, MeasuredCase
from benchmarks.measured.host_terms import Floats, Rows, fitted, with_terms
from capplan import InputError, Profile, list_profiles, load_profile
from capplan.datasets import gpu_sheet
from capplan.models.compose import SYSTEMS, compose_profile, known_decoder
from capplan.serving import rules_of_version, serving_rules

_WITH_OPERATORS: Final = frozenset(system.sheet_key for system in SYSTEMS)


class Composed:
    """Profiles of deployments whose GPU has measured operators, and shipped ones of other GPUs."""

    def __init__(self, cases: Sequence[MeasuredCase]) -> None:
        self._cases = cases
        self._terms: dict[LeftOut, Floats] = {}

    def __call__(self, deployment: Deployment, left_out: LeftOut | None = None) -> Profile:
        if left_out is None:
            return _profile(deployment)
        if left_out not in self._terms:
            kept = [case for case in self._cases if not left_out.covers(case.deployment)]
            self._terms[left_out], _ = fitted(Rows.of(kept, bare_profile))
        return with_terms(bare_profile(deployment), self._terms[left_out])


@functools.cache
def _profile(deployment: Deployment) -> Profile:
    if deployment.gpu not in _WITH_OPERATORS:
        return _shipped(deployment)
    if deployment.version == SLORA:
        raise InputError("must be a model under vLLM", deployment.model, "model")
    version = deployment.version or UNRECORDED
    decoder = known_decoder(deployment.model, deployment.dtype or None, deployment.kv_cache_dtype)
    rules = serving_rules(deployment.rules) if deployment.rules else rules_of_version(version)
    return compose_profile(
        deployment.gpu,
        decoder,
        rules,
        version,
        tp=deployment.tp,
        expert_parallel=deployment.expert_parallel,
    )


def _shipped(deployment: Deployment) -> Profile:
    gpu = gpu_sheet(deployment.gpu).name
    for name in list_profiles():
        profile = load_profile(name)
        same = profile.gpu.name == gpu and deployment.model in profile.model.hf_ids
        if same and profile.tp == deployment.tp and profile.engine.version == deployment.version:
            return profile
    raise InputError("must be a GPU with measured operators or a shipped profile", deployment.gpu, "gpu")
