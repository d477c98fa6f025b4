"""Command lines whose answers are recorded. Files named in them are made in the folder where they run."""

from __future__ import annotations

from typing import Final

from capplan.spec import ROUTER_NAMES

LLAMA: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
QWEN: Final = "h100-64g/qwen2.5-7b/vllm-0.8.5"

EXAMPLES: Final = ("chat-96", "support-12")
"""Examples that are planned; tests run all of them and compare what they print."""
PLANNED_PRESETS: Final = (
    *("loraserve-micro-8", "loraserve-micro-64", "loraserve-micro-8-128", "toppings-maf-128"),
    *("toppings-motivation-3", "toppings-s5", "dt-figure1", "dt-predictable-high-r8-16-n16"),
    *("dt-predictable-low-r8-16-32-n384", "dt-unpredictable-low-64", "dt-training-mixed"),
    *("dt-caching-low-mixed", "dt-caching-mixed-low-1gpu", "slora-s1", "slora-n-20", "slora-cv-4"),
    *("dlora-4", "alpaserve-cv-4", "vllm-hot-adapter", "real-tenants-bursty-small"),
)
"""Presets that are planned with the Llama profile."""

PLANS: Final = {
    "greedy": "plan small.yaml --solver greedy",
    "milp": "plan few.yaml --solver milp",
    "min_latency": "plan latency.yaml",
    "queues": "plan queues.yaml --seeds 2",
    "previous": "plan changed.yaml --previous small.plan.json",
}
"""Further plans, by other solvers and of other features."""

_SCHEDULERS: Final = ("chameleon", "static", "fifo", "sjf", "slora", "slora-every-step")
_CACHES: Final = ("chameleon", "fairshare", "lru", "gdsf", "none")
_SETTINGS: Final = (
    "--max-loras 4",
    "--max-loras 16 --max-lora-rank 64",
    "--max-loras 8 --max-num-seqs 16",
    "--max-loras 8 --max-num-batched-tokens 512",
    "--max-loras 8 --max-cpu-loras 9",
    "--max-loras 8 --max-in-flight 30",
    "--max-loras 8 --gpu-memory-utilization 0.5",
    "--max-loras 8 --no-prefix-caching",
    "--max-loras 8 --gpus-per-link 2",
    "--max-loras 4 --rules vllm-0.11",
    "--max-loras 4 --rules vllm-0.32-sync",
    "--max-loras 4 --rules vllm-0.32-async",
    "--max-loras 4 --rules capplan",
    "--max-loras 4 --detail",
)
_REBALANCING: Final = (
    "--rebalance 60",
    "--rebalance 60 --rebalance-solver capplan",
    "--rebalance 120 --forecast ewma --router smooth-shares",
    "--rebalance 60 --forecast gamma-poisson --router toppings",
)
_BUSY: Final = "simulate busy.yaml --json --requests-out requests.parquet --duration 300"
_FLEET: Final = (
    "simulate small.yaml --plan small.plan.json --json --requests-out requests.parquet --duration 300"
)

TRACES: Final = {
    **{each: f"{_BUSY} {each}" for each in _SETTINGS},
    **{each: f"{_BUSY} --scheduler {each}" for each in _SCHEDULERS},
    **{f"cache {each}": f"{_BUSY} --cache {each}" for each in _CACHES},
    "sjf gdsf": f"{_BUSY} --scheduler sjf --cache gdsf --detail",
    "chameleon both": f"{_BUSY} --scheduler chameleon --cache chameleon --detail",
    "modulated": "simulate modulated.yaml --json --requests-out requests.parquet --max-loras 8",
    "base alone": "simulate base.yaml --json --requests-out requests.parquet --max-loras 0 --duration 300",
    "qwen": "simulate qwen.yaml --json --requests-out requests.parquet --max-loras 6 --detail --duration 300",
    "paired seeds": "simulate busy.yaml --json --max-loras 4,8 --seeds 2 --duration 300",
    **{f"router {each}": f"{_FLEET} --router {each}" for each in ROUTER_NAMES},
    **{each: f"{_FLEET} {each}" for each in _REBALANCING},
    "seed 7": f"{_FLEET} --seed 7",
}
"""Simulations, with every request."""

STATUSES: Final = (
    *("--version", "plan", "plan missing.yaml", "plan small.yaml --gpus x", "plan small.yaml --bogus"),
    *(
        "plan typo.yaml",
        "plan small.yaml --gpus 0",
        "plan heavy.yaml --gpus 1",
        "plan small.yaml --solver no",
    ),
    *("simulate small.yaml --max-loras 0", "simulate small.yaml --max-loras 4 --rules no"),
    *("simulate small.yaml --max-loras 100000", "simulate small.yaml --plan missing.json"),
    *(
        "capacity small.yaml",
        "capacity small.yaml --max-loras 8 --json",
        "compare small.yaml --seeds 1 --json",
    ),
    *("explain small.plan.json", "explain missing.json", "validate small.plan.json", "tune few.yaml"),
    *("export small.plan.json --target vllm -o out", "export small.plan.json --target vllm"),
    *("export small.plan.json --target no", "report small.plan.json -o small.html", "report small.yaml"),
    *("profiles", "profiles --json", "schema plan", "schema no"),
    *("registry list missing.db", "surrogate", "plan few.yaml -o no/folder.json", "workload preset --list"),
    *(
        "workload preset slora-s1",
        "workload preset no",
        "profile compose",
        "calibrate",
        "calibrate -o x.json",
    ),
    *(
        "serve missing.json",
        "bench --url http://127.0.0.1:9 --model m",
        "dataset generate",
        "train",
        "simulte",
    ),
)
"""Command lines whose exit status is recorded."""

FIGURES: Final = {
    "fidelity": "fidelity {reference}/vllm_h100 --seeds 1 --shipped-seeds 2",
    "surrogate_fidelity": "surrogate_fidelity --reference {reference}/vllm_h100",
    "measured_check": "measured_check --data {reference}/measured",
}
"""Benchmarks whose printed digits are recorded."""


def _workload(adapters: str, gpus: int = 4, head: str = "", requests: str = "", llama: bool = True) -> str:
    """Return the text of a workload file with its adapters as lines, and further keys."""
    model, profile = (
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA) if llama else ("Qwen/Qwen2.5-7B-Instruct", QWEN)
    )
    lengths = "prompt_tokens: {mean: 223, std: 245}, output_tokens: {mean: 194, std: 206}"
    text = f"base_model: {model}\nprofile: {profile}\ngpus: {{count: {gpus}}}\n{head}"
    text += f"requests: {{{lengths}{requests}}}\n"
    return text + (f"adapters:\n{adapters}" if adapters else "")


_SMALL: Final = (
    '  - {name: "a-{i}", count: 24, rank: 8, rate_rps: 0.9}\n  - {name: b, rank: 32, rate_rps: 14.0}\n'
)
_ZIPF: Final = '  - {name: "a-{i}", count: 32, rank: 16, popularity: {zipf: 1.0}, total_rate_rps: 9}\n'
_BASE: Final = "base: {rate_rps: 1.0}\n"

FILES: Final = {
    "small.yaml": _workload(_SMALL),
    "few.yaml": _workload('  - {name: "a-{i}", count: 9, rank: 8, rate_rps: 6}\n', gpus=3),
    "changed.yaml": _workload(_SMALL + "  - {name: c, rank: 16, rate_rps: 4.0}\n"),
    "latency.yaml": _workload(_SMALL, head="objective: min_latency\n"),
    "queues.yaml": _workload(_SMALL, head="scheduler: chameleon\ncache: chameleon\n"),
    "typo.yaml": _workload(_SMALL, head="gpu: {count: 4}\n"),
    "heavy.yaml": _workload("  - {name: a, rank: 8, rate_rps: 90}\n"),
    "busy.yaml": _workload(_ZIPF, head=_BASE, requests=", shared_prefix_tokens: 64"),
    "qwen.yaml": _workload(_ZIPF, llama=False),
    "modulated.yaml": _workload(_ZIPF, requests=", arrivals: {process: unpredictable}"),
    "base.yaml": _workload("", head="base: {rate_rps: 8.0}\n"),
}
"""Workload files."""
