"""Traffic of the base model: requests without an adapter."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, InputError, Lengths, Workload, load_workload
from capplan.spec import Arrivals, BaseTraffic, Renewal, Stickiness, Trace
from capplan.workload import Requests, draw_requests

MODEL = "org/tiny"


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "base_model": MODEL,
        "adapters": [Adapter(name=f"a{i}", rank=8, rate_rps=0.3) for i in range(3)],
        "prompt_tokens": Lengths(mean=50, std=30),
        "output_tokens": Lengths(mean=20, std=10),
    }
    return Workload(**(fields | changes))  # type: ignore[arg-type]


def rows(requests: Requests, keep: np.ndarray) -> list[tuple[int, ...]]:
    return list(zip(*(column[keep].tolist() for column in requests[:4]), strict=True))


def test_the_short_form_is_the_long_one() -> None:
    assert workload(base_rate_rps=8.0) == workload(base=BaseTraffic(rate_rps=8.0))
    assert workload(base_rate_rps=8.0).total_rate_rps == pytest.approx(8.9)
    with pytest.raises(InputError, match="base_rate_rps: does not go with base"):
        workload(base_rate_rps=8.0, base=BaseTraffic(rate_rps=1.0))


def test_adapters_may_be_absent_only_beside_base_traffic() -> None:
    assert workload(adapters=[], base_rate_rps=8.0).total_rate_rps == 8.0
    with pytest.raises(InputError, match=r"Workload.adapters: must not be empty, unless there is base"):
        workload(adapters=[])
    with pytest.raises(InputError, match=r"adapters\[0\].name: must differ from base_model"):
        workload(adapters=[Adapter(name=MODEL, rank=8, rate_rps=1.0)], base_rate_rps=1.0)


def test_a_file_may_have_an_empty_list_of_adapters_beside_base_traffic(tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    head = f"base_model: {MODEL}\nprofile: absent/profile\nadapters: []\n"
    path.write_text(head + "base: {rate_rps: 3, prompt_tokens: {mean: 50}, output_tokens: {mean: 20}}\n")
    read = load_workload(path)
    assert (read.adapters, read.base_rate_rps) == ((), 3.0)
    path.write_text(head + "requests: {prompt_tokens: {mean: 50}, output_tokens: {mean: 20}}\n")
    with pytest.raises(InputError, match="adapters: must not be empty, unless there is base traffic"):
        load_workload(path)


def test_a_workload_without_base_traffic_keeps_its_digest() -> None:
    assert workload().digest() == ("1c9376326a27c794e46c534a46e4eb8d315ef2eaed75345444427d9f26b9e59e")


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    arrivals=st.sampled_from([Arrivals.POISSON, Arrivals.DETERMINISTIC, Renewal(process="gamma", cv=2.0)]),
    sticky=st.booleans(),
    base=st.builds(
        BaseTraffic,
        rate_rps=st.floats(0, 3),
        prompt_tokens=st.sampled_from([None, Lengths(mean=9)]),
        arrivals=st.sampled_from([None, Arrivals.DETERMINISTIC]),
    ),
)
def test_base_traffic_leaves_the_requests_of_adapters_as_they_are(
    seed: int, arrivals: Arrivals, sticky: bool, base: BaseTraffic
) -> None:
    stickiness = Stickiness(last=1, probability=0.3) if sticky else None
    without = workload(arrivals=arrivals, stickiness=stickiness)
    drawn = draw_requests(without.replace(base=base), 100.0, seed, 1000)
    everything = draw_requests(without, 100.0, seed, 1000)
    assert rows(drawn, drawn.adapter > 0) == rows(everything, everything.adapter > 0)
    assert np.all(np.diff(drawn.arrival_ns) >= 0)
    own = drawn.adapter == 0
    assert abs(own.sum() - 100.0 * base.rate_rps) < 5 * np.sqrt(100.0 * base.rate_rps) * 2 + 3
    if base.prompt_tokens is not None:
        assert set(drawn.prompt_tokens[own].tolist()) <= {9}
    alone = draw_requests(without.replace(adapters=(), base=base), 100.0, seed, 1000)
    assert rows(alone, alone.adapter == 0) == rows(drawn, own)


def test_a_subset_scales_the_share_of_the_base_model() -> None:
    both = workload(base_rate_rps=8.0)
    part = both.subset(["a1", MODEL], {MODEL: 0.25})
    assert (part.base_rate_rps, [a.name for a in part.adapters]) == (2.0, ["a1"])
    assert both.subset(["a0"]).base is None
    with pytest.raises(InputError, match="must name adapters of the workload"):
        workload().subset([MODEL])


TRACE = "arrival_s,adapter,prompt_tokens,output_tokens\n0.5,a,5,6\n1,,7,8\n2,org/tiny,9,10\n4,a,1,2\n"

HEAD = "base_model: org/tiny\nprofile: ./p.json\n"


def written(folder, body):
    path = folder / "w.yaml"
    path.write_text(HEAD + body)
    return path


def test_an_empty_name_and_the_name_of_the_base_model_are_its_requests(tmp_path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    (tmp_path / "r.csv").write_text("name,rank\na,8\n")
    loaded = load_workload(written(tmp_path, "trace: {file: t.csv, ranks: r.csv}\n"))
    assert loaded.base is not None
    assert loaded.base.rate_rps == 0.5
    drawn = draw_requests(loaded, 10.0, 0, 1000)
    assert drawn.adapter.tolist() == [1, 0, 0, 1]
    assert drawn.prompt_tokens.tolist() == [5, 7, 9, 1]
    assert draw_requests(loaded.subset([MODEL], {MODEL: 0.5}), 10.0, 0, 1000).adapter.tolist() == [0]
    assert loaded.subset(["a"]).trace.names == ("a",)


def test_requests_without_names_are_dealt_to_the_base_model_too(tmp_path) -> None:
    table = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},5,6\n" for i in range(400))
    (tmp_path / "t.csv").write_text(table)
    adapters = "adapters: [{name: a, rank: 8, rate_rps: 1}]\n"
    body = "trace: {file: t.csv}\nbase: {rate_rps: 3}\n"
    drawn = draw_requests(load_workload(written(tmp_path, body + adapters)), 1e3, 0, 1000)
    assert 0.65 < (drawn.adapter == 0).mean() < 0.85
    alone = load_workload(written(tmp_path, body))
    assert draw_requests(alone, 1e3, 0, 1000).adapter.tolist() == [0] * 400


def test_lengths_of_the_base_model_suffice_for_a_workload_without_adapters(tmp_path) -> None:
    body = "base: {rate_rps: 8.0, prompt_tokens: {mean: 223}, output_tokens: {mean: 194}}\n"
    loaded = load_workload(written(tmp_path, body))
    assert (loaded.adapters, loaded.prompt_tokens) == ((), Lengths(mean=223))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("base: {rate_rps: 8.0}\n", "requests.prompt_tokens: is required"),
        ("base: {rate_rps: -1}\n", "w.yaml:3: base.rate_rps: must be a finite number >= 0 (got -1)"),
        ("base: {rate: 1}\n", "base.rate: unknown key; did you mean 'rate_rps'?"),
        (
            "base: {rate_rps: 1, prompt_tokens: {mean: 5}}\ntrace: {file: t.csv}\n",
            "base.prompt_tokens: does not go with trace",
        ),
    ],
)
def test_a_bad_entry_is_refused_with_its_line(tmp_path, body: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_workload(written(tmp_path, body))
    assert message in str(caught.value)


def test_a_trace_of_the_base_model_needs_base_traffic() -> None:
    trace = Trace.from_arrays([1.0], [MODEL], [5], [6])
    assert len(draw_requests(workload(trace=trace, base_rate_rps=1.0), 9.0, 0, 100).adapter) == 1
    with pytest.raises(InputError, match="holds requests of an adapter that is not in adapters"):
        workload(trace=trace)
