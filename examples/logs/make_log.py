"""Make the log of this example: ``python make_log.py`` writes access.csv.gz and ranks.csv."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

HOURS, ADAPTERS, MEAN_RPS = 6, 24, 0.5
START = datetime(2026, 6, 1, 6, tzinfo=UTC)


def main() -> None:
    random = np.random.default_rng(0)
    minutes = np.arange(60 * HOURS)
    rate = 1.0 + 0.7 * np.sin(2.0 * np.pi * minutes / minutes.size)
    counts = random.poisson(60.0 * MEAN_RPS * rate / rate.mean())
    at_s = np.sort(np.repeat(60.0 * minutes, counts) + 60.0 * random.random(counts.sum()))
    popularity = 1.0 / np.arange(1, ADAPTERS + 1) ** 0.8
    adapter = random.choice(ADAPTERS, at_s.size, p=popularity / popularity.sum())
    prompts = np.exp(random.normal(6.0, 0.8, at_s.size)).astype(int) + 1
    outputs = np.exp(random.normal(5.0, 0.6, at_s.size)).astype(int) + 1
    status = random.choice([200, 429, 500], at_s.size, p=[0.98, 0.015, 0.005])
    is_base = random.random(at_s.size) < 0.1
    rows = ["time_local;status;request_time;lora;prompt_tokens;completion_tokens"]
    for i, second in enumerate(at_s):
        when = f"{START + timedelta(seconds=float(second)):%d/%b/%Y:%H:%M:%S %z}"
        name = "-" if is_base[i] else f"tenant-{adapter[i]:02}"
        rows.append(f"{when};{status[i]};{0.02 * outputs[i]:.3f};{name};{prompts[i]};{outputs[i]}")
    with gzip.GzipFile("access.csv.gz", "wb", mtime=0) as file:
        file.write(("\n".join(rows) + "\n").encode())
    ranks = "".join(f"tenant-{i:02},{(8, 16, 32)[i % 3]}\n" for i in range(ADAPTERS))
    Path("ranks.csv").write_text(f"name,rank\n{ranks}", encoding="utf-8")


if __name__ == "__main__":
    main()
