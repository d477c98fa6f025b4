"""What a workload built in Python may hold, and what it answers."""

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError

from capplan import Adapter, EngineConfig, InputError, Lengths, Plan, Slo, Workload
from capplan.spec import LORA_RANKS, Pool, Trace, WorkloadFile, allowed_lora_rank


def workload(**changes):
    fields = {
        "base_model": "meta-llama/Llama-3.1-8B-Instruct",
        "adapters": [Adapter(name=f"a{i}", rank=8, rate_rps=0.05 * i) for i in range(4)],
        "prompt_tokens": Lengths(mean=223, std=245),
        "output_tokens": Lengths(mean=194, std=206),
    }
    return Workload(**(fields | changes))


def adapter(**changes):
    return Adapter(**({"name": "a", "rank": 8, "rate_rps": 1.0} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_rps": -3}, "Adapter.rate_rps: must be a finite number >= 0 (got -3)"),
        ({"rate_rps": math.nan}, "must be a finite number >= 0 (got nan)"),
        ({"rate_rps": math.inf}, "must be a finite number >= 0 (got inf)"),
        ({"rate_rps": True}, "must be a finite number >= 0 (got True)"),
        ({"rate_rps": "1"}, "must be a finite number >= 0 (got '1')"),
        ({"rank": 0}, "Adapter.rank: must be a whole number from 1 to 512 (got 0)"),
        ({"rank": 513}, "from 1 to 512 (got 513)"),
        ({"rank": 8.0}, "must be a whole number"),
        ({"rank": True}, "must be a whole number"),
        ({"name": ""}, "Adapter.name: must be a name"),
        ({"name": "a b"}, "must be a name"),
        ({"name": 3}, "must be a name"),
        ({"max_replicas": 0}, "Adapter.max_replicas: must be a whole number >= 1"),
        ({"apart_from": "legal"}, "must be a list of adapter names"),
        ({"rnak": 1}, "Adapter.rnak: unknown key; did you mean 'rank'?"),
        ({"zzz": 1}, "valid keys are name, rank, rate_rps"),
        ({"prompt_tokens": {"mean": 0}}, "Adapter.prompt_tokens.mean: must be a number of tokens"),
    ],
)
def test_a_bad_adapter_is_refused_with_the_rule_it_breaks(changes, message):
    with pytest.raises(InputError) as caught:
        adapter(**changes)
    assert message in str(caught.value)


def test_numpy_numbers_count_as_the_numbers_they_are():
    one = adapter(rank=np.int64(8), rate_rps=np.float32(0.5))
    assert (one.rank, one.rate_rps) == (8, 0.5)
    assert type(one.rank) is int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of"),
        ({"mean": 3, "values": [1], "counts": [1]}, "exactly one of"),
        ({"std": 3}, "exactly one of"),
        ({"mean": 3, "counts": [1]}, "counts: does not go with mean"),
        ({"mean": 3, "std": -1}, "std: must be a finite number >= 0"),
        ({"values": [1, 2]}, "counts: is required beside values"),
        ({"values": [1, 2], "counts": [1]}, "counts: must have 2 entries"),
        ({"values": [2, 1], "counts": [1, 1]}, "values: must ascend"),
        ({"values": [0], "counts": [1]}, "values[0]: must be a whole number of tokens"),
        ({"values": [1], "counts": [0]}, "counts: must have a positive, finite sum"),
        ({"edges": [1, 5], "counts": [1, 1]}, "counts: must have 1 entries"),
        ({"edges": [5], "counts": [1]}, "edges: must"),
        ({"values": [1], "counts": [1], "std": 1.0}, "std: goes with mean only"),
    ],
)
def test_lengths_take_exactly_one_form(fields, message):
    with pytest.raises(InputError) as caught:
        Lengths(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "sample"),
    [
        (Lengths(mean=7), [7]),
        (Lengths(values=[1, 10], counts=[3, 1]), [1, 1, 1, 10]),
        (Lengths(edges=[1, 3, 8], counts=[2, 1]), [1, 2] * 5 + list(range(3, 8))),
        (Lengths.of([5, 1, 5, 9]), [1, 5, 5, 9]),
    ],
)
def test_moments_are_those_of_the_distribution(lengths, sample):
    assert lengths.mean_tokens == pytest.approx(np.mean(sample))
    assert lengths.std_tokens == pytest.approx(np.std(sample))


def test_gamma_moments_are_the_ones_given():
    assert (Lengths(mean=223, std=245).mean_tokens, Lengths(mean=223, std=245).std_tokens) == (223, 245)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": []}, "Workload.adapters: must not be empty"),
        ({"adapters": [adapter(), adapter()]}, "Workload.adapters[1].name: must be unique (got 'a')"),
        ({"adapters": [adapter(apart_from=["b"])]}, "adapters[0].apart_from[0]: must name another adapter"),
        (
            {"adapters": [adapter(together_with=["a"])]},
            "adapters[0].together_with[0]: must name another adapter",
        ),
        (
            {"adapters": [adapter(together_with=["b"], apart_from=["b"]), adapter(name="b")]},
            "must not name an adapter of apart_from (got 'b')",
        ),
        ({"adapters": [adapter(pool="big")]}, "adapters[0].pool: must be the name of a pool (got 'big')"),
        (
            {"adapters": [adapter(rank=64)], "engine": EngineConfig(max_lora_rank=32)},
            "adapters[0].rank: must not exceed engine.max_lora_rank, which is 32 (got 64)",
        ),
        (
            {"engine": {"max_loras": 4, "max_cpu_loras": 2}},
            "engine.max_cpu_loras: must be at least max_loras",
        ),
        ({"engine": {"max_lora_rank": 48}}, "engine.max_lora_rank: must be one of vLLM's ranks"),
        ({"engine": {"gpu_memory_utilization": 1.5}}, "must be a number above 0 and at most 1"),
        ({"headroom": 1.0}, "headroom: must be a number from 0 to below 1"),
        ({"objective": "fewest"}, "objective: must be 'min_gpus'"),
        ({"objective": "min_cost", "profile": "x"}, "objective: min_cost needs pools"),
        (
            {"objective": "min_cost", "pools": [Pool(name="p", profile="x", count=1)]},
            "pools[0].usd_per_hour: is required",
        ),
        (
            {"pools": [Pool(name="p", profile="x", count=1)], "profile": "x"},
            "pools: replaces profile and gpus",
        ),
        ({"pools": [Pool(name="p", profile="x", count=1)] * 2}, "pools[1].name: must be unique"),
        ({"slo": {"tpt_over_base": 1.5}}, "slo: tpt_over_base and attainment go together"),
        ({"slo": {"ttft_p98_s": 1.5}}, "slo.ttft_p98_s: unknown key; did you mean 'ttft_p"),
        ({"gpus": {"count": 0}}, "gpus.count: must be a whole number >= 1"),
        ({"arrivals": "uniform"}, "arrivals: must be 'poisson'"),
        ({"prompt_tokens": 300}, "prompt_tokens: must be a mapping"),
        ({"trace": [1, 2]}, "trace: must be an instance of Trace"),
    ],
)
def test_a_bad_workload_is_refused_with_the_key_and_the_rule(changes, message):
    with pytest.raises(InputError) as caught:
        workload(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        workload().headroom = 0.5


def test_replace_checks_like_construction_and_leaves_the_original():
    w = workload()
    assert w.replace(headroom=0.2).headroom == 0.2
    assert w.headroom == 0.1
    with pytest.raises(InputError, match="headroom"):
        w.replace(headroom=2)
    with pytest.raises(InputError, match="unknown key"):
        w.replace(headrom=0.2)


def test_subset_keeps_order_scales_rates_and_drops_constraints_on_the_absent():
    adapters = [
        adapter(name="a", rate_rps=1.0),
        adapter(name="b", rate_rps=2.0, apart_from=["a"], together_with=["c"]),
        adapter(name="c", rate_rps=4.0),
    ]
    part = workload(adapters=adapters).subset(["c", "b"], {"c": 0.25})
    assert [(a.name, a.rate_rps) for a in part.adapters] == [("b", 2.0), ("c", 1.0)]
    assert part.adapters[0].apart_from == ()
    assert part.adapters[0].together_with == ("c",)
    assert part.total_rate_rps == 3.0
    assert Workload(**{name: getattr(part, name) for name in Workload.model_fields}) == part


@pytest.mark.parametrize(
    ("names", "shares"), [([], {}), (["zz"], {}), (["a1"], {"a1": 0}), (["a1"], {"a2": 0.5})]
)
def test_subset_refuses_names_and_shares_that_make_no_sense(names, shares):
    with pytest.raises(InputError, match=r"Workload\.subset"):
        workload().subset(names, shares)


def test_digest_depends_on_content_only():
    w = workload()
    assert w.digest() == workload().digest()
    assert w.digest() == w.replace(previous_plan="/somewhere/plan.json").digest()
    assert w.replace(profile="/a/p.json").digest() == w.replace(profile="./b/p.json").digest()
    assert w.replace(profile="/a/p.json").digest() != w.replace(profile="/a/q.json").digest()
    different = [
        w.replace(headroom=0.2),
        w.replace(prompt_tokens=Lengths(mean=223)),
        w.subset(["a1", "a2"]),
        w.replace(trace=trace()),
    ]
    assert len({w.digest(), *(other.digest() for other in different)}) == 5


def test_digest_is_the_same_on_every_machine():
    """A recorded value: it may change only with the document's form; stored plans then no longer match."""
    assert workload().digest() == "dcc637a7d8d69f090dffbf1cfce16d613610442f1264d72681feb05ebac2cdd0"


@pytest.mark.parametrize("rank", [1, 2, 8, 9, 33, 200, 257, 321, 512])
def test_allowed_rank_is_the_next_one_vllm_allows(rank):
    allowed = allowed_lora_rank(rank)
    assert allowed in LORA_RANKS
    assert allowed >= rank
    assert not any(rank <= other < allowed for other in LORA_RANKS)


@pytest.mark.parametrize("rank", [0, 513])
def test_no_rank_is_allowed_outside_1_to_512(rank):
    with pytest.raises(ValueError, match="from 1 to 512"):
        allowed_lora_rank(rank)


def test_slo_lists_the_bounds_that_are_set():
    assert Slo(ttft_p99_s=5, tpot_p50_ms=150.0).latency_bounds() == {"ttft_p99_s": 5.0, "tpot_p50_ms": 150.0}
    assert Slo().latency_bounds() == {}


def trace(**changes):
    columns = {
        "arrival_s": [0.0, 0.5, 0.5, 3.0],
        "adapter": ["a1", "a2", "a1", "a1"],
        "prompt_tokens": [10, 20, 30, 40],
        "output_tokens": [1, 2, 3, 4],
        "duration_s": 4.0,
    }
    return Trace.from_arrays(**(columns | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_s": [0, 2, 1, 3]}, "arrival_s: must be sorted by arrival (row 3) (got 1.0)"),
        ({"arrival_s": [-1, 2, 3, 4]}, "arrival_s: must be finite seconds >= 0 (row 1)"),
        ({"arrival_s": [0, math.nan, 3, 4]}, "must be finite seconds >= 0 (row 2)"),
        ({"arrival_s": [0, 1, 2, math.inf]}, "must be finite seconds >= 0 (row 4)"),
        ({"arrival_s": list("abcd")}, "arrival_s: must be a column of numbers"),
        ({"arrival_s": []}, "arrival_s: must hold at least one request"),
        ({"arrival_s": [0, 1, 2]}, "columns must be equally long"),
        ({"prompt_tokens": [1, 0, 1, 1]}, "prompt_tokens: must be whole numbers of tokens"),
        *(
            ({"output_tokens": [1, tokens, 1, 1]}, "output_tokens: must be whole numbers of tokens")
            for tokens in (0, 1.5, math.nan)
        ),
        ({"adapter": ["a1", "", "a1", "a1"]}, "adapter: must name an adapter (row 2)"),
        ({"duration_s": 2.0}, "duration_s: must be above 0 and not end before the last arrival"),
        ({"duration_s": math.nan}, "duration_s: must be above 0"),
        ({"arrival_s": [0, 0, 0, 0], "duration_s": None}, "duration_s: must be above 0"),
    ],
)
def test_a_bad_trace_is_refused_with_column_and_row(changes, message):
    with pytest.raises(InputError) as caught:
        trace(**changes)
    assert message in str(caught.value)


def test_traces_are_equal_when_their_contents_are():
    assert trace() == trace()
    assert hash(trace()) == hash(trace())
    assert trace() != trace(output_tokens=[1, 2, 3, 5])
    assert workload(trace=trace()) == workload(trace=trace())


def test_trace_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        trace().prompt_tokens[0] = 5


def test_trace_requests_belong_to_adapters_of_the_workload():
    with pytest.raises(InputError, match="trace: holds requests of an adapter that is not in adapters"):
        workload(trace=trace(adapter=["a1", "zz", "a1", "a1"]))


def test_subset_of_a_trace_keeps_whole_adapters_and_thins_shared_ones():
    n = 1000
    whole = Trace.from_arrays(np.arange(n), ["a1", "a2"] * (n // 2), np.arange(1, n + 1), np.ones(n, int))
    part = workload(trace=whole).subset(["a1", "a2"], {"a2": 0.3}).trace
    names = np.array(part.names)[part.adapter]
    assert (names == "a1").sum() == n / 2
    assert (names == "a2").sum() == pytest.approx(0.3 * n / 2, abs=1)
    assert np.all(np.diff(part.arrival_ns) > 0)
    only = workload(trace=whole).subset(["a2"]).trace
    assert only.names == ("a2",)
    assert np.array_equal(only.prompt_tokens, np.arange(2, n + 1, 2))


@pytest.mark.parametrize("model", [Workload, WorkloadFile, Plan])
def test_json_schema_is_valid_json_and_describes_every_field(model):
    schema = model.model_json_schema()
    json.dumps(schema, allow_nan=False)
    for part in (schema, *schema["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            assert field.get("description"), f"{part['title']}.{name}"
        if "properties" in part:
            assert part["additionalProperties"] is False
