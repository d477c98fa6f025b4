"""Hostile values of flags and arguments, by command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.fuzz.case import (
    DIGITS,
    PROFILE,
    SIMULATE,
    Case,
    shown,
)

_FLAGS: Final[Mapping[tuple[str, ...], Mapping[str, Sequence[str]]]] = {
    SIMULATE: {
        "--max-loras": ("1,2,3", "99999999999", DIGITS, ",".join(["2"] * 10_000), "-1", "1e3", "1,,2"),
        "--duration": ("4.62e9", "9e18", "1e308", "1e-300", "-0.0", "31622401", "nan"),
        "--seed": ("9223372036854775808", DIGITS, "-1"),
        "--seeds": ("1000000000", "0", "-1", DIGITS),
        "--max-lora-rank": ("1000000000", "9223372036854775808", "7"),
        "--max-num-seqs": ("1000000000000", "2147483647", "0"),
        "--max-num-batched-tokens": ("1000000000000", "2147483647"),
        "--max-model-len": ("1000000000000", "2147483647"),
        "--max-cpu-loras": ("1000000000000", "2147483647"),
        "--max-in-flight": ("1000000000000", "2147483647"),
        "--gpu-memory-utilization": ("1e-300", "nan", "1e308"),
        "--rules": ("x" * 100_000, "", "--help"),
        "--profile": ("/dev/zero", "./workload.yaml", "x" * 100_000, ""),
        "--requests-out": ("absent/out.parquet", "", "x" * 300, "/dev/full"),
        "--html": ("absent/out.html", "/dev/full", "."),
    },
    ("plan", "workload.yaml", "--time-limit", "2", "--quiet"): {
        "--gpus": ("1000000000", "9223372036854775808", "10001"),
        "--seeds": ("1000000000", "0", DIGITS),
        "--seed": ("9223372036854775808", DIGITS),
        "--time-limit": ("1e308", "1e-300", "nan", "-1"),
        "--move-cost": ("1e308", "nan", "inf"),
        "--robust": ("0.9999999999999999", "1e-300", "nan", "1e308"),
        "--knobs": ("x" * 100_000, ""),
        "--previous": ("/dev/zero", "workload.yaml", ""),
        "--output": ("/dev/full", "absent/plan.json", "."),
        "--solver": ("x" * 100_000, ""),
    },
    (
        *("dataset", "generate", "./profile.json", "-o", "out", "--workers", "1"),
        "--scenarios",
        "2",
        "--duration",
        "20",
    ): {
        "--scenarios": ("1000000000000", DIGITS, "0"),
        "--duration": ("1e308", "4.62e9", "1e-300", "nan"),
        "--seed": ("9223372036854775808", DIGITS),
        "--design": ("x" * 100_000, ""),
        "--workers": ("1000000000000", "0"),
    },
    ("profile", "roofline", "--gpu", "h200", "--model", "llama-3.1-8b", "-o", "out.json", "--quiet"): {
        "--tp": ("1000000000000", DIGITS, "0"),
        "--bandwidth-efficiency": ("1e308", "1e-300", "nan", "-1"),
        "--compute-efficiency": ("1e308", "1e-300", "inf"),
        "--host-link-efficiency": ("1e308", "1e-300"),
        "--step-overhead-ms": ("1e308", "-1", "nan"),
        "--engine-version": (DIGITS, "", "0.8.5\x1b[31m"),
        "--gpu": ("x" * 100_000, "../../etc/passwd"),
    },
    ("profile", "compose", "--gpu", "h100-80g", "--model", "llama-3.1-8b", "-o", "out.json", "--quiet"): {
        "--tp": ("1000000000000", DIGITS, "0", "3"),
        "--engine-version": (DIGITS, "", "0.8.5\x1b[31m"),
        "--rules": ("x" * 100_000, ""),
        "--dtype": ("x" * 100_000, "", "float64"),
        "--gpu": ("x" * 100_000, "../../etc/passwd", "", "h100-80g/../l40s"),
        "--model": ("x" * 100_000, "../x", ""),
    },
    ("export", "plan.json", "--target", "vllm", "-o", "out", "--unverified"): {
        "--port": ("65535", "65536", "-1", DIGITS),
        "--target": ("x" * 100_000, ""),
        "--output": ("/dev/null", "absent/out", "plan.json", "x" * 300, "/proc/self/out"),
    },
    ("workload", "preset"): {
        "--output": ("absent/w.yaml", "/dev/full"),
        "": ("x" * 100_000, "", "../../etc/passwd", "--list"),
    },
    ("calibrate", "--steps", "steps.csv", "--base", "./profile.json", "-o", "out.json", "--quiet"): {
        "--folds": ("1000000000", DIGITS),
        "--seed": ("9223372036854775808", DIGITS),
        "--workers": ("1000000000000",),
        "--form": ("x" * 100_000, ""),
        "--free": (",", "x"),
        "--base": ("/dev/zero", "workload.yaml", "x" * 100_000),
        "--steps": ("/dev/zero", "absent.csv", ".", "workload.yaml"),
        "--name": ("", "\x1b[31m", "../../x"),
    },
    ("bench", "workload.yaml", "--url", "http://127.0.0.1:9"): {
        "--duration": ("1e308", "nan", "-1"),
        "--rate-scale": ("1e308", "nan", "-1"),
        "--request-timeout": ("nan", "-1"),
        "--extra-body": ("[" * 100_000, "[]", DIGITS, "{"),
        "--adapters-map": ("=", "x"),
        "--url": ("ftp://x", "http://[", "\x1b", "http://127.0.0.1:99999999", ""),
    },
    ("explain", "plan.json"): {
        "--group": ("x" * 100_000, ""),
        "--workload": ("/dev/zero", "plan.json", "absent.yaml"),
    },
    ("compare", "workload.yaml", "--solver-time-limit", "2"): {
        "--solvers": ("", ",", "x" * 100_000),
        "--gpus": ("1000000000", "-1"),
        "--seeds": ("0", DIGITS),
        "--html": ("absent/x.html",),
    },
    ("serve", "--model", "tiny-llama", "--port", "0"): {
        "--max-num-seqs": ("1000000000000", DIGITS, "0"),
        "--max-num-batched-tokens": ("1000000000000", "0"),
        "--max-model-len": ("1000000000000", "0"),
        "--max-loras": ("1000000000000", "-1"),
        "--max-lora-rank": ("1000000000000",),
        "--max-cpu-loras": ("1000000000000",),
        "--max-adapters": ("1000000000000",),
        "--max-queue": ("1000000000000", "-1"),
        "--num-kv-blocks": ("1000000000000", "2000000000"),
        "--block-size": ("1000000000000", "0"),
        "--gpu-memory-utilization": ("1e308", "nan"),
        "--port": ("65536", "-1"),
        "--lora-modules": ("=", "a=1e9", "a=999999999999", "a=/dev/zero"),
        "--model": ("/dev/zero", "x" * 100_000, "", "/proc/self/fd/0"),
        "--drain-timeout-s": ("nan", "-1"),
    },
    ("surrogate", "rules", PROFILE): {"--svg": ("absent/x.svg",)},
    ("profiles",): {"": ("/dev/zero", "x" * 100_000, "./workload.yaml", "", "\x1b[31m")},
    ("schema",): {"": ("x", "")},
}
"""Values of flags by command; the empty flag stands for an argument."""


def cases() -> Iterator[Case]:
    """Yield a case per value."""
    for words, flags in _FLAGS.items():
        command = " ".join(words[: 2 if words[0] == "profile" else 1])
        for flag, values in flags.items():
            for number, value in enumerate(values):
                given = (value,) if not flag else (f"{flag}={value}",)
                yield Case(f"{command} {flag} {shown(value)} #{number}", (*words, *given))
