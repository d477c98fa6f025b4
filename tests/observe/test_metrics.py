"""Traffic by the metrics of servers, behind a real HTTP server on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from capplan import InputError
from tests.conftest import http_server, reply
from tests.observe.logs import MODEL, observed

BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class Server:
    """Counters of a server that has answered requests of known lengths."""

    def __init__(self, prefix: str = "vllm:", label: str = "") -> None:
        rng = np.random.default_rng(3)
        self.prefix, self.label, self.scrapes = prefix, label, 0
        self.prompts = np.clip(rng.lognormal(5.0, 0.7, 4000), 1, 1900).astype(int)
        self.outputs = np.clip(rng.lognormal(4.0, 0.6, 4000), 1, 900).astype(int)

    def text(self) -> str:
        """Return the metrics: nothing new at the first scrape, everything at the second."""
        self.scrapes += 1
        count = 1000 if self.scrapes == 1 else len(self.prompts)
        engine = f'engine="0",model_name="{MODEL}"'
        lines = [
            f"{self.prefix}kv_cache_usage_perc{{{engine}}} 0.4",
            f"{self.prefix}gpu_cache_usage_perc{{{engine}}} 0.4",
        ]
        for at, reason in enumerate(("stop", "length")):
            for name in ("a", "b") if self.label else ("",):
                part = count / 2 * ((0.75 if name == "a" else 0.25) if name else 1.0)
                label = f',{self.label}="{name}"' if name else ""
                lines.append(
                    f'{self.prefix}request_success_total{{{engine},finished_reason="{reason}"{label}}} {part}'
                )
                assert at < 2
        for name, lengths in (("prompt", self.prompts[:count]), ("generation", self.outputs[:count])):
            metric = f"{self.prefix}request_{name}_tokens"
            lines += [
                f'{metric}_bucket{{{engine},le="{end}"}} {int((lengths <= end).sum())}' for end in BUCKETS
            ]
            lines += [
                f'{metric}_bucket{{{engine},le="+Inf"}} {count}',
                f"{metric}_sum{{{engine}}} {lengths.sum()}",
            ]
            lines.append(f"{metric}_count{{{engine}}} {count}")
        lines.append(f"{self.prefix}prefix_cache_queries_total{{{engine}}} {1000.0 * count}")
        lines.append(f"{self.prefix}prefix_cache_hits_total{{{engine}}} {250.0 * count}")
        lines.append(
            f'{self.prefix}lora_requests_info{{max_lora="4",running_lora_adapters="x,y",'
            'waiting_lora_adapters="z"} 1.0'
        )
        return "\n".join(lines) + "\n"


def serving(answer: Callable[[str], str]) -> AbstractContextManager[str]:
    """Serve answers, a function of the path, on loopback."""
    return http_server(lambda handler: reply(handler, answer(handler.path).encode()))


@pytest.mark.parametrize("label", ["", "lora_name"])
def test_two_scrapes_give_rates_lengths_and_adapters(label: str) -> None:
    server = Server(label=label)
    with serving(lambda _: server.text()) as url:
        found = observed(f"{url}/metrics", for_s=1.0)
    assert found.requests == 3000
    assert found.rate_rps == pytest.approx(3000 / found.duration_s)
    new = slice(1000, None)
    assert found.prompts.mean() == pytest.approx(server.prompts[new].mean(), rel=0.05)
    assert found.outputs.mean() == pytest.approx(server.outputs[new].mean(), rel=0.05)
    assert np.median(found.prompts) == pytest.approx(np.median(server.prompts), rel=0.15)
    assert found.prefix_hit_share == pytest.approx(0.25)
    if label:
        assert {a.name: a.requests for a in found.adapters} == {"a": 2250, "b": 750}
    else:
        assert {a.name: a.requests for a in found.adapters} == {"x": 1000, "y": 1000, "z": 1000}
        assert any("shared out evenly" in line for line in found.warnings)


def test_a_prometheus_server_gives_the_rate_over_the_window() -> None:
    def answer(path: str) -> str:
        split = urlsplit(path)
        asked = parse_qs(split.query)
        query = asked["query"][0]
        rows: list[object] = []
        if split.path.endswith("query_range"):
            assert query.startswith("sum(increase(vllm:request_success_total[300s]))")
            start, end, step = (float(asked[name][0]) for name in ("start", "end", "step"))
            times = np.arange(start, end + 1, step)
            rows = [{"metric": {}, "values": [[at, "60" if i < 6 else "180"] for i, at in enumerate(times)]}]
        elif "request_success_total" in query:
            rows = [
                {"metric": {"model_name": name, "instance": "i"}, "value": [0, value]}
                for name, value in ((MODEL, "360"), ("tuned", "1080"))
            ]
        elif "_bucket" in query:
            rows = [
                {"metric": {"le": le}, "value": [0, value]}
                for le, value in (("100", "720"), ("200", "1440"), ("+Inf", "1440"))
            ]
        elif "_sum" in query:
            rows = [{"metric": {}, "value": [0, str(1440 * 100)]}]
        elif "_count" in query:
            rows = [{"metric": {}, "value": [0, "1440"]}]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})

    with serving(answer) as url:
        found = observed(url, window="1h")
    assert found.duration_s == 3600
    assert found.requests == 1440
    assert [(a.name, a.requests) for a in found.adapters] == [("tuned", 1080)]
    assert found.base_rate_rps == pytest.approx(0.1)
    assert [at for at, _ in found.steps] == [0.0, 1800.0]
    assert found.steps[1][1] / found.steps[0][1] == pytest.approx(3.0)
    assert found.prompts.mean() == pytest.approx(100, rel=0.02)


def test_servers_that_report_nothing_are_refused_in_one_line() -> None:
    with serving(lambda _: "python_gc_objects 3\n") as url:
        with pytest.raises(InputError, match="must report one of vllm:request_success_total"):
            observed(f"{url}/metrics", for_s=1.0)
        with pytest.raises(
            InputError, match="must be the address of a Prometheus server, or end in /metrics"
        ):
            observed(url)
    with pytest.raises(InputError, match="cannot be reached"):
        observed(f"{url}/metrics", for_s=1.0)
    idle = Server()
    idle.scrapes = 1
    idle.text()
    with (
        serving(lambda _: idle.text()) as url,
        pytest.raises(InputError, match="must count at least one request"),
    ):
        observed(f"{url}/metrics", for_s=1.0)
