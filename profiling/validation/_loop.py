"""Closed loop in resumable stages: profile an engine, calibrate, plan, validate.

Stages are processes of their own: the planner and the report pages lie above this package, and each process
releases its GPU memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capplan.datasets import load_profile
from capplan.errors import CapplanError, InfeasibleError
from capplan.models import crossover, read_kernel_table
from capplan.profiling.server._process import flag_words, run_capplan
from capplan.spec import Adapter, EngineConfig, Lengths, Workload, write_text_atomic
from capplan.twin import SimulationResult, simulate

_STARVED: Final = 0.5
"""Served fraction below which an engine is saturated."""
_MOST_DOUBLINGS: Final = 20
PLANNED: Final = 0.85
"""Planned share of the engine's capacity, near which the number of slots matters."""
SMALL: Final = "small-llama"
SMALL_LLAMA: Final = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
)
"""Llama whose steps take milliseconds, more than a server adds."""
_SATURATED_S: Final = 300.0
_DISAGREES: Final = 1


def saturated_rps(simulated: Callable[[float], SimulationResult]) -> float:
    """Return the request rate at which an engine saturates.

    Raise `InfeasibleError` if no load starves it.
    """
    rate_rps = 1.0
    for _ in range(_MOST_DOUBLINGS):
        found = simulated(rate_rps)
        if found.served_fraction < _STARVED:
            return rate_rps * found.throughput_tok_s / found.offered_tok_s
        rate_rps *= 2.0
    raise InfeasibleError("no load starves this engine", "starvation")


@dataclass(frozen=True)
class LoopSettings:
    """Engine and workload of a closed loop."""

    model: str = SMALL
    """As for `capplan serve`, or `SMALL`: with random weights, of `config`."""
    config: Mapping[str, Any] = field(default_factory=lambda: SMALL_LLAMA)
    device: str = "cpu"
    rules: str | None = None
    """Of the profiled engine; None: its default."""
    threads: int = 1
    adapters: int = 24
    ranks: tuple[int, ...] = (8, 16, 32)
    """Ranks of the adapters in turn."""
    popularity: tuple[float, ...] = ()
    """Relative request rates of the adapters; empty: equal."""
    slots: tuple[int, ...] = (4, 24)
    """Numbers of adapter slots at which steps are profiled."""
    engine: EngineConfig = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=512)
    prompt_tokens: tuple[float, float] = (60.0, 40.0)
    """Mean and standard deviation."""
    output_tokens: tuple[float, float] = (50.0, 30.0)
    form: str | None = "additive"
    """Step model of the profile; None: the best on left-out runs."""
    point_s: float = 2.0
    """Time per operating point of the server."""
    plan_seeds: int = 5
    """Verification seeds of the plan."""


class VoidError(CapplanError):
    """A measurement is void and must be repeated."""


class ClosedLoop:
    """Closed loop in a folder."""

    def __init__(
        self, folder: str | Path, setting: LoopSettings, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.folder, self.setting, self._log = Path(folder), setting, log
        self.folder.mkdir(parents=True, exist_ok=True)
        self.engine = self.folder / "engine"
        self.profile = self.folder / "profile.json"

    @property
    def model(self) -> str:
        if self.setting.model != SMALL:
            return self.setting.model
        config = self.folder / SMALL / "config.json"
        if not config.exists():
            config.parent.mkdir(exist_ok=True)
            write_text_atomic(config, json.dumps(dict(self.setting.config), indent=1))
        return str(config)

    def measure(self, budget_s: float, stages: Sequence[str] = ()) -> bool:
        """Profile the engine; return whether nothing is left."""
        setting = self.setting
        flags = {
            "--model": self.model,
            "--device": setting.device,
            "--rules": setting.rules,
            "--threads": setting.threads,
            "--max-loras": ",".join(map(str, setting.slots)),
            "--ranks": ",".join(map(str, setting.ranks)),
            **{f"--{name.replace('_', '-')}": value for name, value in setting.engine.given.items()},
            "--budget-s": budget_s,
            "--point-s": setting.point_s,
            "--stages": ",".join(stages) or None,
            "-o": self.engine,
        }
        output = self._run("profile", "engine", "--json", "--quiet", *flag_words(flags))
        return bool(json.loads(output)["is_complete"])

    def calibrate(self) -> None:
        """Make a profile of the tables, if it is missing."""
        if not self.profile.exists():
            report = self.folder / "profile.html"
            flags = {"-o": self.profile, "--html": report, "--form": self.setting.form}
            flags["--kernels"] = self._crossover_table()
            self._run("calibrate", str(self.engine), *flag_words(flags))

    def _crossover_table(self) -> Path | None:
        """Return the table of kernels beside those of the engine, if it has the crossover of LoRA kernels."""
        file = self.folder / "kernels" / "kernels.parquet"
        return file if file.exists() and crossover(read_kernel_table(file)) is not None else None

    def plan(self) -> None:
        """Calibrate, and plan for a share of the plan's own capacity estimate."""
        self.calibrate()
        guess_rps = 0.5 * self._saturated_rps()
        load = self._planned("guess-", guess_rps)["predicted"]["load_over_capacity"] or PLANNED
        self._planned("", PLANNED * guess_rps / load)

    def group(self, name: str = "") -> dict[str, Any]:
        """Return the only group of the plan."""
        found: dict[str, Any] = json.loads((self.folder / f"{name}plan.json").read_text())["groups"][0]
        return found

    def validate(self, load: float, duration_s: float, a_max: int | None = None) -> Mapping[str, Any]:
        """Return the validation at a share of the capacity; `a_max` overrides the plan's slots.

        Raise `VoidError` if the measurement is void; its files are removed.
        """
        name = f"validation-{round(100 * load)}" + ("" if a_max is None else f"-slots{a_max}")
        file, report = (self.folder / f"{name}.{kind}" for kind in ("json", "html"))
        found = _sound(file)
        if found is not None:
            return found
        planned = self.group()["predicted"]["load_over_capacity"] or PLANNED
        flags = {
            "--workload": self.folder / "workload.json",
            "--profile": self.profile,
            "--model": self.model,
            "--device": self.setting.device,
            "--threads": self.setting.threads,
            "--rate-scale": load / planned,
            "--duration": duration_s,
            "--html": report,
            "-o": file,
            "--max-loras": a_max,
        }
        self._run("validate", str(self.folder / "plan.json"), *flag_words(flags), fine=(0, _DISAGREES))
        found = _sound(file)
        if found is None:
            faults = "; ".join(_faults(file))
            for each in (file, report):
                each.unlink(missing_ok=True)
            raise VoidError(f"{name} is void: {faults}")
        return found

    def _document(self, rate_rps: float) -> dict[str, Any]:
        """Return the workload file for a total request rate."""
        setting = self.setting
        weights = setting.popularity or (1.0,) * setting.adapters
        return {
            "version": 1,
            "base_model": load_profile(str(self.profile)).model.hf_ids[0],
            "profile": str(self.profile.resolve()),
            "engine": setting.engine.given,
            "requests": {
                name: dict(zip(("mean", "std"), getattr(setting, name), strict=True))
                for name in ("prompt_tokens", "output_tokens")
            },
            "adapters": [
                {
                    "name": f"a{at}",
                    "rank": setting.ranks[at % len(setting.ranks)],
                    "rate_rps": rate_rps * weight / sum(weights),
                }
                for at, weight in enumerate(weights)
            ],
        }

    def _saturated_rps(self) -> float:
        """Return the rate at which the simulated engine saturates, every adapter in a slot."""
        profile = load_profile(str(self.profile))

        def simulated(rate_rps: float) -> SimulationResult:
            document = self._document(rate_rps)
            workload = Workload(
                base_model=document["base_model"],
                adapters=tuple(Adapter(**each) for each in document["adapters"]),
                **{name: Lengths(**each) for name, each in document["requests"].items()},
            )
            fields = {"a_max": self.setting.adapters, "s_max": max(self.setting.ranks), **document["engine"]}
            return simulate(workload, profile, duration_s=_SATURATED_S, **fields)

        return saturated_rps(simulated)

    def _planned(self, name: str, rate_rps: float) -> dict[str, Any]:
        """Plan for a rate; return the only group."""
        workload, plan = (self.folder / f"{name}{kind}.json" for kind in ("workload", "plan"))
        if not plan.exists():
            write_text_atomic(workload, json.dumps(self._document(rate_rps), indent=1))
            flags = {
                "--profile": self.profile,
                "--gpus": 1,
                "--seeds": self.setting.plan_seeds,
                "-o": plan,
            }
            self._run("plan", str(workload), "--quiet", *flag_words(flags))
        return self.group(name)

    def _run(self, *words: str, fine: Sequence[int] = (0,)) -> str:
        self._log("capplan " + " ".join(words))
        return run_capplan(words, self.setting.threads, fine)


def _sound(file: Path) -> Mapping[str, Any] | None:
    """Return a written validation; None if missing or void."""
    if not file.exists() or _faults(file):
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _faults(file: Path) -> list[str]:
    return [fault for group in json.loads(file.read_text())["groups"] for fault in group["faults"]]
