"""The closed loop on the reference engine: profile, calibrate, plan, validate.

    python -m benchmarks.closed_loop --out DIR

measures the engine, makes a profile of the tables, plans 24 adapters on one engine with it, and runs the plan
at 40, 70 and 90 % of its capacity and once overloaded, each under the twin's very requests; then it measures
other numbers of slots under overload, to see what the plan's choice is worth. Every stage leaves a file in
DIR; the same command goes on where an earlier one was stopped. All of it takes about 35 minutes with the
defaults, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity_figures import markdown
from capplan import Adapter, Lengths, Workload, load_profile, simulate

ADAPTERS: Final = 24
RANKS: Final = (8, 16, 32)
PLANNED: Final = 0.7
LOADS: Final = (0.4, 0.7, 0.9, 1.5)
OVERLOAD: Final = 1.5
MAX_NUM_SEQS: Final = 32
MODEL_LEN: Final = 512
BUDGET_TOKENS: Final = 512
SATURATED_S: Final = 300.0
SPAN_BAR: Final = 2.0
SLOTS_BAR: Final = 0.05
SMALL_LLAMA: Final = {
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
"""A Llama whose steps take milliseconds, not tenths of them: then they are more than what a server adds."""


@dataclass(frozen=True)
class Run:
    """One validation."""

    load: float
    a_max: int
    facts: dict[str, Any]

    def metric(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(e for e in self.group["comparisons"] if e["name"] == name)
        return found

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.facts["groups"][0]
        return group


class ClosedLoop:
    """The stages, each with a file that says that it is done."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.out = Path(given.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if given.model == "small-llama":
            config = self.out / "small-llama" / "config.json"
            config.parent.mkdir(exist_ok=True)
            config.write_text(json.dumps(SMALL_LLAMA, indent=1))
            self.model = str(config)
        else:
            self.model = given.model

    def run(self) -> list[Run]:
        profile = self.out / "profile.json"
        self._stage(self.out / "profiled", self._profile_command())
        self._stage(profile, self._calibrate_command(profile))
        guess_rps = 0.5 * self._saturated_rps(profile)
        first = self._plan(profile, "guess", guess_rps)
        self._plan(profile, "", PLANNED * guess_rps / first["predicted"]["load_over_capacity"])
        planned = self._group("")["engine_args"]["max_loras"]
        runs = [self._validated(load, planned, is_plan=True) for load in LOADS]
        slots = [n for n in self.given.slots if n != planned]
        return runs + [self._validated(OVERLOAD, n, is_plan=False) for n in slots]

    def _plan(self, profile: Path, name: str, rate_rps: float) -> dict[str, Any]:
        """Plan a workload of this rate, and return the plan's only group."""
        workload, plan = (self.out / f"{name}{kind}.json" for kind in ("workload", "plan"))
        if not workload.exists():
            self._write_workload(workload, profile, rate_rps)
        self._stage(
            plan, ["plan", str(workload), "--profile", str(profile), "--gpus", "1", "-q", "-o", str(plan)]
        )
        return self._group(name)

    def _group(self, name: str) -> dict[str, Any]:
        group: dict[str, Any] = json.loads((self.out / f"{name}plan.json").read_text())["groups"][0]
        return group

    def _profile_command(self) -> list[str]:
        words = ["profile", "engine", "--model", self.model, "-o", str(self.out / "engine")]
        words += ["--a-max", ",".join(map(str, self.given.profiled_slots)), "--ranks", "8,16,32"]
        words += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MODEL_LEN)]
        words += ["--max-num-batched-tokens", str(BUDGET_TOKENS), "--threads", str(self.given.threads)]
        return [*words, "--budget-s", str(self.given.budget_s), "--point-s", str(self.given.point_s)]

    def _calibrate_command(self, profile: Path) -> list[str]:
        report = str(self.out / "profile.html")
        words = ["calibrate", str(self.out / "engine"), "-o", str(profile), "--report", report]
        return [*words, "--form", self.given.form]

    def _workload(self, profile: Path, rate_rps: float) -> Workload:
        return Workload(
            base_model=load_profile(str(profile)).model.hf_ids[0],
            profile=str(profile),
            adapters=[
                Adapter(name=f"a{at}", rank=RANKS[at % len(RANKS)], rate_rps=rate_rps / ADAPTERS)
                for at in range(ADAPTERS)
            ],
            prompt_tokens=Lengths(mean=60, std=40),
            output_tokens=Lengths(mean=50, std=30),
        )

    def _saturated_rps(self, profile: Path) -> float:
        """Return the rate that the twin's engine answers when far more is asked, every adapter in a slot."""
        file = self.out / "saturated.json"
        if not file.exists():
            known = load_profile(str(profile))
            settings: dict[str, Any] = {
                "a_max": ADAPTERS,
                "s_max": max(RANKS),
                "max_num_seqs": MAX_NUM_SEQS,
                "max_num_batched_tokens": BUDGET_TOKENS,
                "max_model_len": MODEL_LEN,
            }
            rate_rps = 1.0
            while True:
                asked = self._workload(profile, rate_rps)
                found = simulate(asked, known, duration_s=SATURATED_S, **settings)
                if found.served_fraction < 0.5:
                    break
                rate_rps *= 2.0
            file.write_text(json.dumps(rate_rps * found.throughput_tok_s / found.offered_tok_s))
        rate: float = json.loads(file.read_text())
        return rate

    def _write_workload(self, file: Path, profile: Path, rate_rps: float) -> None:
        made = self._workload(profile, rate_rps)
        lengths = {
            name: {"mean": each.mean, "std": each.std}
            for name, each in (("prompt_tokens", made.prompt_tokens), ("output_tokens", made.output_tokens))
        }
        document = {
            "version": 1,
            "base_model": made.base_model,
            "profile": str(profile.resolve()),
            "engine": {
                "max_num_seqs": MAX_NUM_SEQS,
                "max_num_batched_tokens": BUDGET_TOKENS,
                "max_model_len": MODEL_LEN,
            },
            "requests": lengths,
            "adapters": [{"name": a.name, "rank": a.rank, "rate_rps": a.rate_rps} for a in made.adapters],
        }
        file.write_text(json.dumps(document, indent=1))

    def _validated(self, load: float, a_max: int, *, is_plan: bool) -> Run:
        name = f"validation-{round(100 * load)}" + ("" if is_plan else f"-slots{a_max}")
        file = self.out / f"{name}.json"
        words = ["validate", str(self.out / "plan.json"), "--workload", str(self.out / "workload.json")]
        words += ["--model", self.model, "--profile", str(self.out / "profile.json"), "-o", str(file)]
        words += [
            "--rate-scale",
            str(load / self._planned_load()),
            "--duration-s",
            str(self.given.duration_s),
        ]
        words += ["--threads", str(self.given.threads), "--report", str(self.out / f"{name}.html")]
        self._stage(file, words if is_plan else [*words, "--max-loras", str(a_max)], may_disagree=True)
        return Run(load, a_max, json.loads(file.read_text()))

    def _planned_load(self) -> float:
        """Return which share of its capacity the plan says that the engine has to do."""
        return float(self._group("")["predicted"]["load_over_capacity"] or PLANNED)

    def _stage(self, done: Path, words: Sequence[str], *, may_disagree: bool = False) -> None:
        """Run a command unless its file is there, and leave the file if it did not."""
        if done.exists():
            return
        command = [sys.executable, "-m", "capplan", *words]
        print(time.strftime("%H:%M:%S"), "capplan", *words, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.given.threads)}
        status = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        if status != 0 and not (may_disagree and status == 1):
            raise SystemExit(f"capplan {words[0]} ended with status {status}")
        if not done.exists():
            done.write_text("")


def report(runs: Sequence[Run]) -> bool:
    """Print one table of the plan at its loads and one of the slots; tell whether all holds."""
    at_plan = runs[: len(LOADS)]
    names = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")
    head = ["load", *(f"{name}: measured" for name in names), *(f"{name}: SMAPE, %" for name in names)]
    head += ["constant step: throughput, ITL, %", "offered load, %", "starved: measured, predicted", "agrees"]
    rows = []
    for run in at_plan:
        each = [run.metric(name) for name in names]
        rows.append(
            (
                f"{run.load:.0%}",
                *(_shown(e["measured"]) for e in each),
                *(_shown(e["error"]) for e in each),
                f"{_shown(each[0]['constant_step_error'])}, {_shown(each[1]['constant_step_error'])}",
                _shown(each[0]["offered_load_error"]),
                f"{run.group['starved']}, {run.group['predicted_starved']}",
                "yes" if run.group["agrees"] else "NO: " + "; ".join(run.group["faults"]),
            )
        )
    print(markdown(tuple(head), rows))
    gaps = [run.metric("itl_ms_mean")["measured"] for run in at_plan]
    span = max(gaps) / min(gaps)
    print(f"\nmeasured mean ITL spans a factor {span:.2f} (bar {SPAN_BAR:g})\n")
    swept = [run for run in runs if run.load == OVERLOAD]
    best = max(run.metric("throughput_tok_s")["measured"] for run in swept)
    slots = [
        (
            str(run.a_max) + (" (plan)" if run in at_plan else ""),
            _shown(run.metric("throughput_tok_s")["measured"]),
            _shown(run.metric("throughput_tok_s")["predicted"]),
            f"{run.metric('throughput_tok_s')['measured'] / best:.3f}",
        )
        for run in sorted(swept, key=lambda run: run.a_max)
    ]
    print(markdown(("slots", "throughput, tok/s", "predicted", "of the best"), slots))
    chosen = next(run for run in at_plan if run.load == OVERLOAD)
    near = chosen.metric("throughput_tok_s")["measured"] >= (1.0 - SLOTS_BAR) * best
    return near and span >= SPAN_BAR and all(run.group["agrees"] for run in at_plan)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="small-llama", help="small-llama, or as for capplan serve")
    parser.add_argument("--form", default="additive")
    parser.add_argument("--budget-s", type=float, default=900.0, help="of the profile")
    parser.add_argument("--point-s", type=float, default=6.0)
    parser.add_argument("--duration-s", type=float, default=120.0, help="of each validation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profiled-slots", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--slots", type=int, nargs="*", default=[2, 4, 8, 16, 24])
    given = parser.parse_args()
    return 0 if report(ClosedLoop(given).run()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
