"""Adapters added and removed at run time, aborted requests, failed loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capplan import InputError
from capplan.engine import Engine, Request, SamplingParams
from capplan.engine import _engine_core as engine_core
from capplan.engine._core_process import warm_up
from capplan.serving import NONE
from tests.engine.engines import TINY_MODEL as TINY
from tests.engine.engines import check_engine

MODES: dict[str, dict[str, Any]] = {
    "capplan": {"rules": "capplan"},
    "vllm": {"rules": "vllm-0.8", "enable_prefix_caching": False},
    "pages": {"rules": "capplan", "memory": "unified", "shared_prefix_tokens": 4},
    "slora": {"rules": "slora", "num_kv_blocks": 60},
    "chameleon": {"scheduler": "chameleon", "cache": "chameleon", "num_kv_blocks": 60},
    "chunks": {"scheduler": {"policy": "fifo", "chunked": True}, "cache": "none", "num_kv_blocks": 60},
    "async": {"rules": "vllm-0.32-async", "shared_prefix_tokens": 4},
    "overlap": {"rules": "vllm-0.33-async", "shared_prefix_tokens": 4, "depth": 2},
}
SLOTLESS = ("slora", "chameleon", "chunks")
every_mode = pytest.mark.parametrize("mode", MODES)


def tiny(mode: str = "capplan", adapters: Any = None, **more: Any) -> Engine:
    sizes = {
        "num_kv_blocks": 40,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_loras": 2,
        "max_lora_rank": 8,
        "max_adapters": 5,
        "max_cpu_loras": None if mode in SLOTLESS else 3,
        "max_model_len": 64,
        "max_num_batched_tokens": 40,
    }
    given_adapters = {"a": 3, "b": 8} if adapters is None else adapters
    chosen = sizes | MODES[mode] | more
    depth = chosen.pop("depth", 1)
    engine = Engine(TINY, given_adapters, **chosen)
    engine.core.depth = depth  # as on a GPU
    return engine


def submitted(engine: Engine, adapter: str | None, prompt: int = 5, max_tokens: int = 6) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = engine.new_request(list(range(1, prompt + 1)), adapter, params)
    assert engine.submit(request)
    return request


def run_out(engine: Engine) -> list[Request]:
    """Step until all requests have finished; return them in the order of their end."""
    finished = []
    while True:
        step = engine.step()
        check_engine(engine)
        if step is not None:
            finished += step.finished
        elif not engine.wait_for_adapter():
            assert not engine.core.requests
            return finished


def write_adapter(folder: Path, rank: int = 4, seed: int = 0, width: int = 0, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    size = width or TINY.hidden_size
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(rank, size, generator=rng),
        f"{name}.lora_B.weight": torch.randn(TINY.query_size, rank, generator=rng),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8} | config)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    return folder


@every_mode
def test_an_adapter_added_at_run_time_gives_the_same_output(mode: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "new")
    with tiny(mode, {"a": 3, "new": folder}) as engine:
        [expected] = engine.generate([[1, 2, 3]], "new", max_tokens=9, ignore_eos=True)
    with tiny(mode, {"a": 3}) as engine:
        before = submitted(engine, "a")
        engine.step()
        engine.add_adapter("new", folder)
        assert engine.adapters == ("a", "new")
        [answer] = engine.generate([[1, 2, 3]], "new", max_tokens=9, ignore_eos=True)
        run_out(engine)
        assert before.finish_reason == "length"
    assert answer.token_ids == expected.token_ids


@every_mode
def test_prompts_are_scored_whatever_the_rules(mode: str) -> None:
    """In chunks, after preemptions, and beside requests whose prefix is cached."""
    prompts = [[9, 8, 7, 6, *range(at, at + 4 * at + 1)] for at in range(1, 9)]
    names = ["a", "b", None, "a", "b", "a", "b", None]
    with Engine(TINY, {"a": 3, "b": 8}, num_kv_blocks=200, max_lora_rank=8) as alone:
        right = alone.generate(
            prompts, names, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=True
        )
        forced = alone.generate([prompts[3][:7]], "a", max_tokens=1, logprobs=300)[0].logprobs
    assert forced is not None
    assert right[3].prompt_logprobs[6].logprob == pytest.approx(dict(forced[0].top)[prompts[3][7]], abs=1e-4)
    with tiny(mode, num_kv_blocks=30 if mode not in SLOTLESS else 40) as engine:
        engine.generate(prompts, names, max_tokens=12, ignore_eos=True)  # fills a cache of prefixes
        found = engine.generate(
            prompts, names, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=True
        )
        check_engine(engine)
        assert not engine.core._scored
    for prompt, done, expected in zip(prompts, found, right, strict=True):
        assert done.token_ids == expected.token_ids
        assert len(done.prompt_logprobs) == len(prompt) - 1
        assert [each.logprob for each in done.prompt_logprobs] == pytest.approx(
            [each.logprob for each in expected.prompt_logprobs], abs=1e-4
        )


def test_a_prompt_scored_at_once_has_the_scores_of_its_chunks() -> None:
    found = []
    for tokens in (256, 16):  # of a step; scores are of at most 64 tokens at a time
        long = TINY.replace(max_positions=256)
        with Engine(long, {"a": 3}, num_kv_blocks=100, max_num_batched_tokens=tokens) as engine:
            [answer] = engine.generate([[*range(150)]], "a", max_tokens=1, prompt_logprobs=True)
            found.append([each.logprob for each in answer.prompt_logprobs])
    assert len(found[0]) == 149
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@every_mode
def test_a_reused_adapter_number_keeps_nothing_of_the_old_adapter(mode: str, tmp_path: Path) -> None:
    """Slot, host copy and cached prefixes of the old adapter are gone."""
    folders = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(3)]
    prompt = list(range(20))
    answers = []
    with tiny(mode, {}) as engine:
        for folder in folders:
            engine.add_adapter("x", folder)
            [answer] = engine.generate([prompt], "x", max_tokens=6, keep_logits=True)
            assert answer.logits is not None
            answers.append(answer.logits[0])
            engine.remove_adapter("x")
            check_engine(engine)
            assert engine.adapters == ()
    for folder, logits in zip(folders, answers, strict=True):
        with tiny(mode, {"x": folder}) as engine:
            [alone] = engine.generate([prompt], "x", max_tokens=1, keep_logits=True)
            assert alone.logits is not None
            assert torch.allclose(alone.logits[0], logits, atol=1e-5)


def cut_off(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def too_large(folder: Path) -> None:
    write_adapter(folder, rank=9)


def gone(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(cut_off, "cannot be read"), (too_large, "at most max_lora_rank, 8"), (gone, "cannot be read")],
)
def test_an_unusable_adapter_is_refused_without_side_effects(
    spoil: Any, message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "bad")
    spoil(folder)
    with tiny() as engine:
        other = submitted(engine, "a")
        engine.step()
        with pytest.raises(InputError, match=message):
            engine.add_adapter("bad", folder)
        assert engine.adapters == ("a", "b")
        run_out(engine)
        assert other.finish_reason == "length"
        engine.add_adapter("bad", write_adapter(folder))
        assert engine.generate([[1]], "bad", max_tokens=2)[0].finish_reason == "length"


def test_adapter_names_are_unique_and_their_number_is_bounded() -> None:
    with tiny(max_adapters=3) as engine:
        with pytest.raises(InputError, match="no adapter has"):
            engine.add_adapter("a", 4)
        with pytest.raises(InputError, match="512"):
            engine.add_adapter("c", 0)
        engine.add_adapter("c", 4)
        with pytest.raises(InputError, match="max_adapters, 3"):
            engine.add_adapter("d", 4)
        with pytest.raises(InputError, match="one of a, b, c"):
            engine.remove_adapter("d")
    with pytest.raises(InputError, match="at least the 2 adapters"):
        tiny(max_adapters=1)


@every_mode
def test_an_adapter_in_use_cannot_be_removed(mode: str) -> None:
    with tiny(mode) as engine:
        request = submitted(engine, "a")
        for _ in range(2):  # waiting, then running or loading
            with pytest.raises(InputError, match="1 requests of it are in flight"):
                engine.remove_adapter("a")
            engine.step()
        engine.abort(request)
        engine.remove_adapter("a")
        check_engine(engine)
        assert engine.adapters == ("b",)


def test_a_request_of_a_removed_adapter_is_refused() -> None:
    with tiny() as engine:
        request = engine.new_request([1], "a", SamplingParams())
        engine.remove_adapter("a")
        engine.add_adapter("other", 5)
        with pytest.raises(InputError, match="must not have been removed"):
            engine.submit(request)


@every_mode
def test_an_aborted_request_frees_its_resources(mode: str) -> None:
    with tiny(mode, max_num_seqs=2) as engine:
        requests = [submitted(engine, name) for name in ("a", "b", None, "a", "b", "a")]
        for _ in range(3):
            engine.step()
        check_engine(engine)
        for request in requests[:0:-1]:
            engine.abort(request)
            check_engine(engine)
            assert request.finish_reason == "abort"
        engine.abort(requests[1])  # no effect the second time
        assert run_out(engine) == requests[:1]
        assert len(requests[0].output) == 6
        engine.abort(requests[0])
        assert requests[0].finish_reason == "length"


@pytest.mark.parametrize("stage", ["waiting", "loading", "prefilling", "decoding"])
def test_a_request_aborted_at_any_stage_returns_its_quota(stage: str) -> None:
    with tiny("chameleon", virtual_time=True, max_num_batched_tokens=8) as engine:
        request = submitted(engine, "a", prompt=20, max_tokens=9)
        other = submitted(engine, "b")
        if stage != "waiting":
            assert engine.step() is None  # admitted, and its adapter is being loaded
            assert request.running
        if stage in ("prefilling", "decoding"):
            engine.wait_for_adapter()
            engine.step()
            assert not request.output
        while stage == "decoding" and len(request.output) < 2:
            engine.step()
        engine.abort(request)
        check_engine(engine)
        assert run_out(engine) == [other]
        pooled = engine.core.state.pooled
        assert pooled.queues.outstanding.sum() == pooled.counts.reserved == pooled.counts.pinned_pages == 0
        assert pooled.window.execution_ns[0] == NONE < pooled.window.execution_ns[1]


def test_a_request_ended_by_a_stop_string_has_an_execution() -> None:
    with tiny("chameleon", virtual_time=True) as engine:
        request = submitted(engine, "a", max_tokens=9)
        while len(request.output) < 2:
            assert engine.step() or engine.wait_for_adapter()
        engine.abort(request, "stop")
        assert engine.core.state.pooled.window.execution_ns[0] > 0


def test_requests_of_removed_adapters_leave_the_window() -> None:
    with tiny("chameleon", virtual_time=True) as engine:
        engine.generate([[1, 2]] * 5, ["a", "b", None, "a", "b"], max_tokens=3)
        engine.remove_adapter("a")
        engine.add_adapter("c", 2)
        pooled = engine.core.state.pooled
        counts = pooled.window[: pooled.counts.n_window]
        assert counts.adapter[counts.arrival_ns != NONE].tolist() == [2, 0, 2]


def test_the_warm_up_is_in_no_window() -> None:
    with tiny("chameleon", virtual_time=True) as engine:
        warm_up(engine)
        pooled = engine.core.state.pooled
        assert pooled.counts.n_window == 8
        assert set(pooled.window.arrival_ns[:8].tolist()) == {NONE}


def test_a_small_adapter_takes_longer_to_load_per_byte() -> None:
    times = {"base_ms": 0.5, "ms_per_rank": 0.25, "padding_ms": 0.125}
    adapters = {"small": 1, "large": 8}
    with tiny("chameleon", adapters, cache="gdsf", load_times=times) as engine:
        own = engine.core.state.pooled.adapters
        assert own.bytes[2] == 8 * own.bytes[1]
        assert own.cost_ns[1:3].tolist() == [875_000, 2_500_000]


def test_an_engine_without_a_profile_measures_its_loads() -> None:
    """Only for the cache that reads them; for others they are in proportion to the bytes."""
    for cache, is_measured in (("gdsf", True), ("lru", False)):
        with tiny("chameleon", {"small": 1, "large": 8}, cache=cache) as engine:
            own = engine.core.state.pooled.adapters
            assert (own.cost_ns[1:3].tolist() == own.bytes[1:3].tolist()) != is_measured
            assert own.cost_ns[1:3].min() > 0
            assert not engine.core.lora.in_memory


def test_idle_periods_are_refreshed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns: list[int] = []
    monkeypatch.setattr(engine_core, "refresh", lambda *arguments: times_ns.append(arguments[-1]))
    with tiny("chameleon", virtual_time=True) as engine:
        for periods in (0.5, 1.5, 3.5, 100.5, 100.6):
            engine.core.clock.sleep_until(int(periods * engine.core.limits.refresh_ns))
            engine.step()
        assert [at_ns / engine.core.limits.refresh_ns for at_ns in times_ns] == [1, 2, 3, 4, 100]


@every_mode
@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_load_fails_only_the_requests_of_its_adapter(mode: str, waits: bool, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "late")
    with tiny(mode, {"a": 3}) as engine:
        engine.add_adapter("late", folder)
        content = (folder / "adapter_model.safetensors").read_bytes()
        cut_off(folder)
        bystander = submitted(engine, "a")
        if waits:
            engine.step()
        failing = [submitted(engine, "late") for _ in range(6)]
        base = submitted(engine, None)
        finished = run_out(engine)
        assert set(finished) == {bystander, base, *failing}
        assert {request.finish_reason for request in failing} == {"error"}
        assert all("cannot be read" in str(request.error) for request in failing)
        assert [request.output for request in failing] == [[]] * 6
        assert (bystander.finish_reason, base.finish_reason) == ("length", "length")
        with tiny(mode, {"a": 3}) as other:
            [alone] = other.generate([[1, 2, 3, 4, 5]], "a", max_tokens=6, ignore_eos=True)
        assert tuple(bystander.output) == alone.token_ids
        answer = engine.completion(failing[0])
        assert answer.error is not None
        (folder / "adapter_model.safetensors").write_bytes(content)
        [answer] = engine.generate([[1, 2, 3, 4, 5]], "late", max_tokens=6, ignore_eos=True)
        with tiny(mode, {"late": folder}) as other:
            [right] = other.generate([[1, 2, 3, 4, 5]], "late", max_tokens=6, ignore_eos=True)
        assert answer.token_ids == right.token_ids


def write_nan_adapter(folder: Path) -> Path:
    file = write_adapter(folder) / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    return folder


def test_an_error_in_the_last_step_is_no_execution(tmp_path: Path) -> None:
    """The queues are designed from times in execution, which an error ends early."""
    with tiny("chameleon", virtual_time=True) as engine:
        engine.add_adapter("nan", write_nan_adapter(tmp_path / "nan"))
        answers = engine.generate([[1, 2]] * 2, ["nan", "a"], max_tokens=1, ignore_eos=True)
        assert [answer.finish_reason for answer in answers] == ["error", "length"]
        window = engine.core.state.pooled.window
        assert (window.execution_ns[:2] == NONE).tolist() == [True, False]


def test_an_adapter_that_becomes_non_finite_fails_its_requests(tmp_path: Path) -> None:
    with tiny() as engine:
        engine.add_adapter("nan", write_nan_adapter(tmp_path / "nan"))
        answers = engine.generate([[1, 2]] * 2, ["nan", "a"], max_tokens=3, ignore_eos=True)
        assert [answer.finish_reason for answer in answers] == ["error", "length"]
        assert "finite" in str(answers[0].error)


ACTIONS = ("submit", "submit", "submit", "step", "step", "step", "abort", "add", "remove", "break", "repair")


@every_mode
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(seed=st.integers(0, 2**32 - 1), actions=st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=60))
def test_random_actions_leak_nothing(mode: str, seed: int, actions: list[str], tmp_path: Path) -> None:
    """Random submissions, steps, aborts, and adapters added, removed, broken and repaired."""
    rng = np.random.default_rng(seed)
    folder = write_adapter(tmp_path / "f")
    content = (folder / "adapter_model.safetensors").read_bytes()
    requests: list[Request] = []
    ended: list[Request] = []
    with tiny(mode, {"a": 3, "b": 8, "f": folder}, max_in_flight=9) as engine:
        for at, action in enumerate(actions):
            if action == "submit":
                name = [None, *engine.adapters][rng.integers(len(engine.adapters) + 1)]
                params = SamplingParams(max_tokens=int(rng.integers(1, 12)), ignore_eos=True)
                prompt = rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
                request = engine.new_request(prompt, name, params)
                if engine.submit(request):
                    requests.append(request)
            elif action == "step":
                step = engine.step()
                ended += step.finished if step is not None else []
            elif action == "abort" and requests:
                request = requests[rng.integers(len(requests))]
                if request.finish_reason is None:
                    engine.abort(request)
                    ended.append(request)
            elif action == "add" and len(engine.adapters) < 5:
                engine.add_adapter(f"new{at}", int(rng.integers(1, 9)))
            elif action == "remove" and engine.adapters:
                name = engine.adapters[rng.integers(len(engine.adapters))]
                in_use = any(r.adapter_name == name and r.finish_reason is None for r in requests)
                if in_use:
                    with pytest.raises(InputError, match="in flight"):
                        engine.remove_adapter(name)
                else:
                    engine.remove_adapter(name)
            elif action in ("break", "repair"):
                kept = content if action == "repair" else content[:-9]
                (folder / "adapter_model.safetensors").write_bytes(kept)
            check_engine(engine)
        ended += run_out(engine)
        assert sorted(r.number for r in ended) == sorted(r.number for r in requests)
        assert all(r.finish_reason in ("length", "abort", "error") for r in requests)
        assert all(r.error is None or r.adapter_name == "f" for r in requests)
        for name in engine.adapters:
            engine.remove_adapter(name)
            check_engine(engine)
        assert engine.core.blocks.in_use() == 0
        assert not engine.core.lora.in_memory
