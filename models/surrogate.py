"""Surrogates: throughput and starvation of one GPU in microseconds, with an interval and a valid range."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile, surrogate_path
from capplan.errors import InputError
from capplan.models.features import FEATURES, expected_tok_s, feature_vector
from capplan.models.forest import Forest, forest_answer
from capplan.spec import Profile, Workload

SURROGATE_VERSION = 1
KINDS = ("forest",)
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SurrogateAnswer:
    """What a surrogate says of one GPU."""

    throughput_tok_s: float
    low_tok_s: float
    """5 % of twin runs lie below."""
    high_tok_s: float
    """5 % of twin runs lie above."""
    starvation_probability: float
    starved: bool
    in_range: bool
    """Whether every feature lies within the range of the training data; if not, ask the twin."""


@dataclass(frozen=True)
class Surrogate:
    """Two forests for one profile.

    Attributes
    ----------
    profile
        The profile whose twin they were trained on.
    throughput
        Answers the natural logarithm of throughput over the load that the mean field expects to be carried.
    starvation
        Answers the probability that the served fraction is below 0.9.
    low, high
        Smallest and largest training value of every feature, shape (features,).
    interval
        5 % and 95 % quantiles of the logarithmic error on training scenarios that a tree had not seen.
    report
        How it was trained and how well it does.
    """

    profile: Profile
    throughput: Forest
    starvation: Forest
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    interval: tuple[float, float]
    report: dict[str, object]

    def predict(
        self,
        workload: Workload,
        *,
        a_max: int,
        s_max: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
    ) -> SurrogateAnswer:
        """Answer for one GPU that serves all of `workload`; parameters as in `capplan.simulate`."""
        features = feature_vector(
            workload,
            self.profile,
            a_max=a_max,
            s_max=s_max,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        return self.answer(features)

    def answer(self, features: NDArray[np.float32]) -> SurrogateAnswer:
        """Answer for a feature vector in the order of `FEATURES`."""
        expected = float(expected_tok_s(features))
        share = forest_answer(self.throughput, features)
        probability = float(forest_answer(self.starvation, features))
        return SurrogateAnswer(
            throughput_tok_s=expected * float(np.exp(share)),
            low_tok_s=expected * float(np.exp(share + self.interval[0])),
            high_tok_s=expected * float(np.exp(share + self.interval[1])),
            starvation_probability=probability,
            starved=probability >= 0.5,
            in_range=bool(np.all((features >= self.low) & (features <= self.high))),
        )


def profile_digest(profile: Profile) -> str:
    """Return a digest of everything in a profile that throughput and starvation depend on."""
    relevant = profile.model_dump(include={"gpu", "tp", "model", "engine"})
    for part in ("step_latency", "memory", "loading"):
        fitted = getattr(profile, part)
        relevant[part] = [fitted.form, {name: c.value for name, c in fitted.coefficients.items()}]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def load_surrogate(profile: str | Profile, kind: str = "forest") -> Surrogate:
    """Load the surrogate shipped for a profile.

    Parameters
    ----------
    profile
        Name of a shipped profile, path of a profile JSON, or a profile.
    kind
        ``forest``.

    Raises
    ------
    InputError
        When there is none, its file is damaged, or it was trained for other numbers than the profile holds
        now.
    """
    if kind not in KINDS:
        raise InputError(f"must be one of {', '.join(KINDS)}", kind, "kind")
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    return read_surrogate(surrogate_path(loaded.name, kind), loaded)


def read_surrogate(path: Path, profile: Profile) -> Surrogate:
    """Read a surrogate file and check that it belongs to `profile`."""
    where = str(path)
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            columns = {name: arrays[name] for name in arrays.files}
        header = json.loads(columns.pop("header").item())
        forests = [Forest(*(columns[f"{name}_{field}"] for field in Forest._fields)) for name in _FORESTS]
        low, high = columns["low"], columns["high"]
    except FileNotFoundError:
        raise InputError(
            f"no surrogate; make one with: capplan train {profile.name}", location=where
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        raise InputError(
            f"damaged; make a new one with: capplan train {profile.name}", location=where
        ) from None
    for key, expected in (
        ("version", SURROGATE_VERSION),
        ("profile_digest", profile_digest(profile)),
        ("features", list(FEATURES)),
    ):
        if header.get(key) != expected:
            raise InputError(
                f"{key} does not match; make a new one with: capplan train {profile.name}", location=where
            )
    for forest in forests:
        _check_forest(forest, where)
    return Surrogate(
        profile=profile,
        throughput=forests[0],
        starvation=forests[1],
        low=low,
        high=high,
        interval=(float(header["interval"][0]), float(header["interval"][1])),
        report=header["report"],
    )


_FORESTS = ("throughput", "starvation")


def _check_forest(forest: Forest, where: str) -> None:
    """Refuse arrays that lead the compiled walk astray: every step must go forward, to a node that exists."""
    nodes = np.arange(forest.feature.size)
    inner = forest.feature >= 0
    sound = (
        all(column.shape == nodes.shape for column in forest[1:])
        and forest.roots.size > 0
        and bool(np.all((forest.roots >= 0) & (forest.roots < nodes.size)))
        and bool(np.all(forest.feature < len(FEATURES)))
        and bool(np.all(forest.left[inner] > nodes[inner]) and np.all(forest.left[inner] < nodes.size))
        and bool(np.all(forest.right[inner] > nodes[inner]) and np.all(forest.right[inner] < nodes.size))
        and bool(np.all(np.isfinite(forest.value)))
    )
    if not sound:
        raise InputError("damaged: the trees do not hold together", location=where)


def surrogate_bytes(surrogate: Surrogate) -> bytes:
    """Return the file of a surrogate: arrays and a JSON header, nothing that could run on load."""
    header = {
        "version": SURROGATE_VERSION,
        "profile": surrogate.profile.name,
        "profile_digest": profile_digest(surrogate.profile),
        "features": list(FEATURES),
        "interval": list(surrogate.interval),
        "report": surrogate.report,
    }
    columns: dict[str, NDArray[np.generic]] = {"header": np.array(json.dumps(header, sort_keys=True))}
    for name, forest in zip(_FORESTS, (surrogate.throughput, surrogate.starvation), strict=True):
        columns |= {f"{name}_{field}": getattr(forest, field) for field in Forest._fields}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, low=surrogate.low, high=surrogate.high, **columns)  # type: ignore[arg-type]
    return buffer.getvalue()
