"""Prompt and output lengths drawn in pairs depend on each other as they did where they were recorded."""

import numpy as np
import pytest

from capplan import Adapter, InputError, Lengths, Workload, load_workload
from capplan.spec import LengthPairs
from capplan.workload import draw_requests

PROMPTS = np.array([10, 100, 1000, 9000])
OUTPUTS = np.array([900, 90, 9, 1])


def workload(**changes):
    pairs = LengthPairs.from_arrays(PROMPTS, OUTPUTS)
    prompts, outputs = pairs.marginals()
    fields = {
        "base_model": "m",
        "adapters": [Adapter(name="a", rank=8, rate_rps=10.0)],
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "length_pairs": pairs,
    }
    return Workload(**(fields | changes))


def test_pairs_are_drawn_jointly_and_equally_often():
    r = draw_requests(workload(), 4000.0, 0, 8192)
    drawn, counts = np.unique(np.stack([r.prompt_tokens, r.output_tokens]), axis=1, return_counts=True)
    assert drawn.T.tolist() == [[10, 900], [100, 90], [1000, 9], [8192, 1]]
    assert counts / counts.sum() == pytest.approx([0.25] * 4, abs=0.01)


def test_pairs_do_not_move_arrivals():
    paired, alone = (
        draw_requests(workload(), 100.0, 0, 8192),
        draw_requests(workload(length_pairs=None), 100.0, 0, 8192),
    )
    assert np.array_equal(paired.arrival_ns, alone.arrival_ns)
    assert not np.array_equal(paired.output_tokens, alone.output_tokens)


def test_an_adapter_with_lengths_of_its_own_has_no_pairs():
    own = Adapter(name="own", rank=8, rate_rps=10.0, prompt_tokens=Lengths(mean=77))
    r = draw_requests(workload(adapters=[own, Adapter(name="a", rank=8, rate_rps=10.0)]), 500.0, 0, 10_000)
    mine = r.adapter == 1
    assert set(r.prompt_tokens[mine]) == {77}
    assert set(r.output_tokens[mine]) == set(OUTPUTS)
    rows = set(zip(r.prompt_tokens[~mine].tolist(), r.output_tokens[~mine].tolist(), strict=True))
    assert rows == set(zip(PROMPTS.tolist(), OUTPUTS.tolist(), strict=True))


def test_the_digest_and_equality_know_the_pairs():
    same, other = workload(), workload(length_pairs=LengthPairs.from_arrays(PROMPTS, OUTPUTS[::-1]))
    assert same == workload()
    assert len({same.digest(), other.digest(), workload(length_pairs=None).digest()}) == 3
    assert hash(same.length_pairs) == hash(workload().length_pairs)
    with pytest.raises(ValueError, match="read-only"):
        same.length_pairs.prompt_tokens[0] = 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1]), "columns must be equally long"),
        (([], []), "prompt_tokens: must "),
        (([1, 0], [1, 1]), "prompt_tokens: must be whole numbers of tokens from 1 to 16777216 (row 2)"),
        (([1, 1], [1, 1.5]), "output_tokens: must be whole numbers"),
    ],
)
def test_bad_pairs_are_refused(columns, message):
    with pytest.raises(InputError) as caught:
        LengthPairs.from_arrays(*columns)
    assert message in str(caught.value)


def test_pairs_and_a_correlation_do_not_go_together():
    with pytest.raises(InputError, match="length_correlation: does not go with length_pairs"):
        workload(length_correlation=0.5)


def test_a_workload_file_takes_pairs_from_a_file(tmp_path):
    (tmp_path / "p.csv").write_text("prompt_tokens,output_tokens\n5,60\n50,6\n")
    (tmp_path / "workload.yaml").write_text(
        "base_model: m\nprofile: p\nrequests: {lengths_from: p.csv}\n"
        "adapters: [{name: a, rank: 8, rate_rps: 9}]\n"
    )
    w = load_workload(tmp_path / "workload.yaml")
    assert (w.prompt_tokens.mean_tokens, w.output_tokens.mean_tokens) == (27.5, 33)
    r = draw_requests(w.subset(["a"], {"a": 0.5}), 100.0, 0, 8192)
    assert set(zip(r.prompt_tokens.tolist(), r.output_tokens.tolist(), strict=True)) == {(5, 60), (50, 6)}
