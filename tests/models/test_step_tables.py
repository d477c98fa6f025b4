"""Step tables: interpolation, extrapolation, and what a table is refused for."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from capplan import InputError
from capplan.datasets import load_profile
from capplan.models import (
    ADDITIVE,
    TABLE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    rank_ms,
    step_ms,
    uses_decode_ranks,
    uses_ranks,
)
from capplan.spec import FittedModel, StepTable
from tests.twin.examples import FIT, part, profile
from tests.twin.scenarios import make_tables

TOKENS = StepTable.of({"tokens": [1, 4, 16]}, [1.0, 1.5, 4.5])
AXES = {"requests": [1, 3], "kv_tokens": [0, 10, 30]}
REQUESTS = StepTable.of(AXES, [[0.5, 1.0, 5.0], [1.5, 2.0, 5.0]])
STEP = StepFeatures(5.0, 2.0, 20.0, 1.0, 4.0, 8.0, 0.0, 1.0, 8.0)


def model(tokens: StepTable = TOKENS, requests: StepTable = REQUESTS, **coefficients: float) -> FittedModel:
    tables = {"tokens_ms": tokens, "requests_ms": requests}
    return part("additive", **coefficients).replace(form="table", tables=tables)


def table_ms(of: FittedModel, tokens: float, requests: float, kv_tokens: float) -> float:
    features = STEP._replace(tokens=tokens, requests=requests, kv_tokens=kv_tokens)
    return step_ms(TABLE.code, coefficient_array(of), features)


@st.composite
def models(draw: st.DrawFn) -> FittedModel:
    tables = make_tables(lambda low, high: draw(st.integers(low, high)))
    return model(tables["tokens_ms"], tables["requests_ms"])


AMOUNTS = st.floats(0.0, 60.0)


@given(models(), AMOUNTS, AMOUNTS, AMOUNTS)
def test_inside_the_grid_a_table_is_linear_interpolation(
    of: FittedModel, tokens: float, requests: float, kv_tokens: float
) -> None:
    """Beside an interpolator of other people; below the first point the value there applies."""
    expected = 0.0
    at = {"tokens": tokens, "requests": requests, "kv_tokens": kv_tokens}
    for table in of.tables.values():
        for axis in table.axes:
            at[axis.name] = min(at[axis.name], axis.points[-1])
        points = [axis.points for axis in table.axes]
        inside = [max(at[axis.name], axis.points[0]) for axis in table.axes]
        expected += float(RegularGridInterpolator(points, table.grid_ms)(inside)[0])
    assert table_ms(of, **at) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(models(), AMOUNTS, st.floats(0.0, 0.06))
def test_kv_tokens_beyond_the_cache_cost_more(of: FittedModel, kv_tokens: float, cache: float) -> None:
    beyond = {"ms_per_kv_ktoken_beyond_cache": 2.0, "cache_kv_ktokens": cache}
    more = of.replace(coefficients=of.coefficients | part("additive", **beyond).coefficients)
    expected = table_ms(of, 5.0, 2.0, kv_tokens) + 2.0 * max(0.0, kv_tokens / 1e3 - cache)
    assert table_ms(more, 5.0, 2.0, kv_tokens) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(models())
def test_a_table_is_exact_at_its_points(of: FittedModel) -> None:
    tokens, requests = of.tables["tokens_ms"], of.tables["requests_ms"]
    line = [table_ms(of, point, 0.0, 0.0) for point in tokens.axes[0].points]
    assert line == (tokens.grid_ms + requests.values[0]).tolist()
    rows, columns = (axis.points for axis in requests.axes)
    plane = [[table_ms(of, 0.0, row, column) for column in columns] for row in rows]
    assert plane == (tokens.values[0] + requests.grid_ms).tolist()


@given(models(), st.tuples(AMOUNTS, AMOUNTS, AMOUNTS), st.tuples(*[st.floats(0.0, 1e6)] * 3))
def test_more_of_anything_takes_no_less_time(
    of: FittedModel, at: tuple[float, float, float], more: tuple[float, float, float]
) -> None:
    """Inside and outside the grid; for every quantity alone, so for all of them together."""
    before = table_ms(of, *at)
    for number in range(3):
        further = list(at)
        further[number] += more[number]
        assert table_ms(of, *further) >= before * (1.0 - 1e-12)
        before = table_ms(of, *(a + m for a, m in zip(at, more, strict=True)))
        assert before >= table_ms(of, *further) * (1.0 - 1e-12)
        before = table_ms(of, *at)


@given(models(), AMOUNTS, AMOUNTS, AMOUNTS)
def test_a_table_has_no_jumps(of: FittedModel, tokens: float, requests: float, kv_tokens: float) -> None:
    """Around the ends of the axes as well: no slope of these tables exceeds 120 ms per unit."""
    for axis in (axis for table in of.tables.values() for axis in table.axes):
        at = {"tokens": tokens, "requests": requests, "kv_tokens": kv_tokens}
        for end in axis.points:
            near = [table_ms(of, **at | {axis.name: max(0.0, end + step)}) for step in (-1e-9, 1e-9)]
            assert near[1] - near[0] <= 1e-6


def test_beyond_the_grid_the_last_slope_goes_on() -> None:
    of = model()
    constant = 1.0 + 0.5
    assert table_ms(of, 16.0 + 100.0, 1.0, 0.0) - constant == pytest.approx(3.5 + 100.0 * 0.25)
    # Slopes that fall with requests or KV tokens are replaced by their mean: no line crosses another.
    over_kv_tokens, over_requests = (0.2 + 0.15) / 2, (0.5 + 0.5 + 0.0) / 3
    assert table_ms(of, 1.0, 1.0, 130.0) - constant == pytest.approx(4.5 + 100.0 * over_kv_tokens)
    assert table_ms(of, 1.0, 3.0, 130.0) - constant == pytest.approx(4.5 + 100.0 * over_kv_tokens)
    assert table_ms(of, 1.0, 103.0, 0.0) - constant == pytest.approx(1.0 + 100.0 * over_requests)
    steeper = model(requests=StepTable.of(AXES, [[0.5, 1.0, 5.0], [1.5, 2.0, 8.0]]))
    assert table_ms(steeper, 1.0, 1.0, 130.0) - constant == pytest.approx(4.5 + 100.0 * 0.2)
    assert table_ms(steeper, 1.0, 3.0, 130.0) - constant == pytest.approx(7.5 + 100.0 * 0.3)


def test_tables_are_added_to_the_other_terms() -> None:
    terms = {"base_ms": 3.0, "ms_per_request": 0.5, "ms_per_slot": 0.25, "ms_per_ktoken": 2.0}
    of, plain = model(**terms), part("additive", **(dict.fromkeys(ADDITIVE.coefficients, 0.0) | terms))
    alone = step_ms(0, coefficient_array(plain), STEP)
    assert alone == pytest.approx(3.0 + 1.0 + 1.0 + 0.01)
    tables = step_ms(TABLE.code, coefficient_array(model()), STEP)
    assert step_ms(TABLE.code, coefficient_array(of), STEP) == pytest.approx(alone + tables)


@pytest.mark.parametrize("kernel", ["vllm", "bgmv", "mbgmv"])
def test_rank_terms_are_those_of_the_additive_form(kernel: Any) -> None:
    terms = {"ms_per_decode_krank": 0.3, "ms_per_prefill_krank": 0.7, "ms_per_prefill": 0.1}
    ranks = StepRanks(3.0, 2.0, 3.0, 2.0, 40.0, 32.0, 56.0, 24.0, 480.0, prefill_mpairs=2.5)
    plain = coefficient_array(part("additive", **(dict.fromkeys(ADDITIVE.coefficients, 0.0) | terms)))
    of = coefficient_array(model(**terms))
    additive = rank_ms(latency_code("additive", kernel), plain, 64.0, ranks)
    code = latency_code("table", kernel)
    assert rank_ms(code, of, 64.0, ranks) == pytest.approx(additive)
    with_pairs = coefficient_array(model(**terms, ms_per_prefill_mpair=4.0))
    assert rank_ms(code, with_pairs, 64.0, ranks) == pytest.approx(additive + 10.0)


def test_the_twin_counts_only_what_a_model_depends_on() -> None:
    expected = {
        (): (False, False),
        ("ms_per_request",): (False, False),
        ("ms_per_prefill_mpair",): (True, False),
        ("ms_per_prefill",): (True, False),
        ("ms_per_decode_krank", "ms_per_prefill_mpair"): (True, True),
    }
    for terms, (ranks, decodes) in expected.items():
        k = coefficient_array(model(**dict.fromkeys(terms, 1.0)))
        assert (uses_ranks(TABLE.code, k), uses_decode_ranks(TABLE.code, k)) == (ranks, decodes)


def test_tables_survive_a_file(tmp_path: Any) -> None:
    made = profile().replace(step_latency=model(base_ms=1.0))
    path = tmp_path / "profile.json"
    path.write_text(made.model_dump_json())
    assert load_profile(path).step_latency == made.step_latency
    assert "tables" not in json.loads(profile().model_dump_json())["step_latency"]


POINTS = "step_latency.tables.tokens_ms.axes[0].points"
VALUES = "step_latency.tables.{}.values"


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("tokens_ms", {"points": [1, 4, 4]}, f"{POINTS}[2]: must increase, and follows 4 (got 4.0)"),
        ("tokens_ms", {"points": [1, 1.0001, 4]}, "by at least 0.001, and follows 1 (got 1.0001)"),
        ("tokens_ms", {"points": [1, 4, "x"]}, f"{POINTS}[2]: must be number (got 'x')"),
        ("tokens_ms", {"points": [1]}, f"{POINTS}: must hold 2 to 512 values (got 1)"),
        (
            "tokens_ms",
            {"values": [1, 3, 2]},
            f"{VALUES.format('tokens_ms')}[2]: must not decrease along tokens, and follows 3 (got 2.0)",
        ),
        (
            "requests_ms",
            {"values": [1, 2, 3, 2, 1, 4]},
            f"{VALUES.format('requests_ms')}[4]: must not decrease along requests, and follows 2 (got 1.0)",
        ),
        ("tokens_ms", {"values": [1, 2]}, "must hold one value per point of 3 tokens (got 2)"),
        ("tokens_ms", {"values": [1, 2, -3]}, "must be greater than or equal to 0 (got -3)"),
        ("tokens_ms", {"values": [1, 2, math.nan]}, "must hold finite numbers only (got 'NaN')"),
        ("tokens_ms", {"name": "requests"}, "must be the axes tokens in this order (got 'requests')"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(
    tmp_path: Any, table: str, changes: dict[str, Any], message: str
) -> None:
    document = json.loads(profile().replace(step_latency=model()).model_dump_json())
    found = document["step_latency"]["tables"][table]
    for key, value in changes.items():
        (found if key == "values" else found["axes"][0])[key] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as refused:
        load_profile(path)
    assert str(refused.value).endswith(message)
    assert "\n" not in str(refused.value)


def test_a_model_has_the_tables_of_its_form() -> None:
    one = {"tokens_ms": TOKENS}
    with pytest.raises(InputError, match=r"tables.requests_ms: is required by the form 'table'"):
        FittedModel(form="table", coefficients={}, tables=one, fit=FIT)
    with pytest.raises(InputError, match=r"tables.tokens_ms: must be absent with the form 'additive'"):
        FittedModel(form="additive", coefficients={}, tables=one, fit=FIT)
    with pytest.raises(InputError, match=r"must be one of tokens_ms, requests_ms"):
        model().replace(tables=model().tables | {"decode_ms": TOKENS})
    with pytest.raises(InputError, match=r"coefficients.base_s: unknown key; did you mean 'base_ms'"):
        coefficient_array(model(base_s=1.0))


def test_a_grid_is_bounded_and_has_the_shape_of_its_values() -> None:
    with pytest.raises(InputError, match=r"must hold at most 16,384 values \(got 40000\)"):
        StepTable.of({"requests": range(200), "kv_tokens": range(200)}, np.zeros((200, 200)))
    with pytest.raises(InputError, match=r"values\[1\]: must be a finite number"):
        StepTable.of({"tokens": [1, 2]}, [1.0, math.nan])
    with pytest.raises(InputError, match=r"must have the shape of the axes, \(3, 2\) \(got \(2, 3\)\)"):
        StepTable.of({"requests": range(3), "kv_tokens": range(2)}, np.zeros((2, 3)))
