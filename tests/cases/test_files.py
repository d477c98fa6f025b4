"""Files that a command reads or writes: damaged predictors, caches, devices, configs, modes, encodings."""

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capplan._jit as compile_
from capplan import InputError
from capplan.engine import RecordFile
from capplan.profiling.load import RequestFile
from capplan.spec import write_text_atomic
from capplan.workload import FEATURES, read_predictor
from tests.cli.conftest import command, environment, error_line
from tests.fuzz.case import PROFILE, with_value
from tests.fuzz.file_inputs import (
    CONFIGS,
    FIELDS,
    FLAGS,
    LLAMA,
    OTHERS,
    TRACE,
    mutated,
    named,
    trained_predictor,
    workload_with,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def trained() -> bytes:
    """A learned predictor whose trees use all features, with missing values on both sides."""
    return trained_predictor()


def features(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    columns = (
        rng.integers(1, 400, count),
        rng.choice([0, 1, 2, 3, np.nan], count),
        rng.integers(0, 24, count),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def test_predictions_are_those_of_xgboost(trained: bytes, tmp_path: Path) -> None:
    import xgboost

    (tmp_path / "good.json").write_bytes(trained)
    learned = read_predictor(str(tmp_path / "good.json"))
    model = xgboost.Booster(model_file=bytearray(trained))
    rows = xgboost.DMatrix(features(20_000), feature_names=list(FEATURES))
    chosen = np.argmax(model.predict(rows, output_margin=True), axis=1)
    assert len(set(chosen)) == learned.tokens.size
    assert np.array_equal(learned.predict(features(20_000)), learned.tokens[chosen])


MODEL = "learner.gradient_booster.model"
DAMAGE: dict[str, tuple[str, Any]] = {
    "oob": (f"{MODEL}.trees.0.left_children.0", 10**6),
    "cyc": (f"{MODEL}.trees.0.left_children.0", 0),
    "oobf": (f"{MODEL}.trees.0.split_indices.0", 2**30),
    "info": (f"{MODEL}.tree_info.3", 10**6),
    "inf2": (f"{MODEL}.tree_info.3", -(10**6)),
    "cats": (f"{MODEL}.trees.0.split_type.0", 1),
    "cls": ("learner.learner_model_param.num_class", "3"),
    "ntok": ("learner.attributes.class_tokens", "[1]"),
    "hugetok": ("learner.attributes.class_tokens", "[1, 2, 3, 4, 99999999999999999999]"),
    "indptr": (f"{MODEL}.iteration_indptr.1", 10**9),
    "short": (f"{MODEL}.trees.0.split_conditions", [1.0]),
    "objective": ("learner.objective.softmax_multiclass_param.num_class", "3000000"),
    "base": ("learner.learner_model_param.base_score", "[0.5, 0.5]"),
    "base text": ("learner.learner_model_param.base_score", "x"),
    "leaf": (f"{MODEL}.trees.0.split_conditions.0", 1e39),
    "half a node": (f"{MODEL}.trees.0.left_children.0", 1.5),
    "a tree in a tree": (f"{MODEL}.trees.0.right_children.0", 1),
    "parents": (f"{MODEL}.trees.1.parents.1", 5),
    "deleted": (f"{MODEL}.trees.1.tree_param.num_nodes", "3"),
    "vector leaves": (f"{MODEL}.trees.1.tree_param.size_leaf_vector", "5"),
    "categories": (f"{MODEL}.trees.1.categories", [3]),
    "encoded": (f"{MODEL}.cats.enc", [1]),
    "a number as categories": (f"{MODEL}.cats", 3),
    "a number as children": (f"{MODEL}.trees.0.left_children", 3),
    "a number as tree": (f"{MODEL}.trees.0", 3),
    "a number as parameters": (f"{MODEL}.trees.0.tree_param", 3),
    "no trees": (f"{MODEL}.trees", []),
    "an object as trees": (f"{MODEL}.trees", {}),
    "dart": ("learner.gradient_booster.name", "dart"),
    "names": ("learner.feature_names", ["a", "b", "c"]),
    "adapters": ("learner.attributes.adapters", '["a", 1]'),
    "no attributes": ("learner.attributes", {}),
    "a number as learner": ("learner", 3),
}


def damaged(content: bytes, key: str, value: Any) -> str:
    """Return a predictor's file with one value replaced."""
    document = json.loads(content)
    *parents, last = (int(part) if part.isdigit() else part for part in key.split("."))
    part = document
    for each in parents:
        part = part[each]
    part[last] = value
    return json.dumps(document)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_predictor_is_refused_by_the_name_of_its_damaged_part(
    name: str, trained: bytes, tmp_path: Path
) -> None:
    key, value = DAMAGE[name]
    file = tmp_path / "damaged.json"
    file.write_text(damaged(trained, key, value))
    with pytest.raises(InputError) as refused:
        read_predictor(str(file))
    line = str(refused.value)
    assert line.startswith(f"{file}: learner")
    shown = refused.value.location.partition(": ")[2]
    assert key.startswith(shown[: len(MODEL)]) or shown.startswith(key)
    assert "\n" not in line


@pytest.mark.parametrize("name", ["oob", "cyc", "oobf", "info", "inf2", "cats", "cls", "ntok", "hugetok"])
def test_25_a_damaged_predictor_of_a_workload_ends_in_one_line(
    name: str,
    trained: bytes,
    case,
    run,
) -> None:
    folder = case("25-xgboost-json")
    (folder / f"{name}.json").write_text(damaged(trained, *DAMAGE[name]))
    refused = run("simulate", folder / f"w-{name}.yaml", "--duration", "30", "--workers", "1")
    assert f"{name}.json: learner." in error_line(refused)


def test_25_a_deeply_nested_predictor_is_refused_and_an_undamaged_one_works(trained, case, run) -> None:
    folder = case("25-xgboost-json")
    (folder / "good.json").write_bytes(trained)
    (folder / "deep.json").write_text('{"learner": ' * 100_000 + "1" + "}" * 100_000)
    (folder / "short.json").write_bytes(trained[: len(trained) // 2])
    for name in ("deep", "short"):
        refused = run("simulate", folder / f"w-{name}.yaml", "--duration", "30", "--workers", "1")
        assert f"{name}.json" in error_line(refused)
    good = run("simulate", folder / "w-good.yaml", "--duration", "30", "--workers", "1")
    assert good.exit_code == 0, good.output


def test_a_predictor_with_any_node_replaced_is_refused_or_predicts_known_classes(trained, tmp_path) -> None:
    """500 changes at random places of the JSON, by values that fit nowhere or almost."""
    rng, document = random.Random(25), json.loads(trained)
    refusals = []
    file = tmp_path / "damaged.json"
    for _ in range(500):
        file.write_text(mutated(document, rng))
        try:
            learned = read_predictor(str(file))
        except InputError as error:
            refusals.append(str(error))
        else:
            assert set(learned.predict(features(50))) <= set(learned.tokens.tolist())
    assert len(refusals) > 250
    assert not any("\n" in line for line in refusals)


def plus_1(x: int) -> int:
    return x + 1


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    """Read the variables of the cache folder again, during the test and after it."""

    def clear() -> None:
        for known in (compile_.cache_dir, compile_._is_cache_usable):
            known.cache_clear()

    clear()
    yield
    clear()


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("given", ["", ".", "cache"])
@pytest.mark.parametrize("caches", ["", ".", "cache", "/absolute"])
def test_26_an_empty_or_relative_cache_folder_counts_as_unset(given, caches, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CAPPLAN_CACHE_DIR", given)
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = Path(caches) if caches == "/absolute" else tmp_path / ".cache"
    assert compile_.cache_dir().parent == expected / "capplan"


@pytest.mark.usefixtures("fresh_cache")
def test_26_no_cache_is_kept_below_a_relative_home_folder(monkeypatch, tmp_path) -> None:
    for name, value in {"CAPPLAN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "."}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert compile_.jit(plus_1)(41) == 42
    assert list(tmp_path.iterdir()) == []


def writable_by_others(cache: Path) -> None:
    cache.chmod(0o666)


def writable_by_the_group(cache: Path) -> None:
    cache.chmod(0o660)


def in_a_writable_folder(cache: Path) -> None:
    cache.parent.chmod(0o777)


def in_a_writable_cache(cache: Path) -> None:
    cache.parent.parent.chmod(0o777)


def below_a_writable_root(cache: Path) -> None:
    cache.parents[2].chmod(0o777)


def behind_a_link(cache: Path) -> None:
    cache.rename(cache.with_suffix(".elsewhere"))
    cache.symlink_to(cache.with_suffix(".elsewhere"))


def in_a_linked_folder(cache: Path) -> None:
    cache.parent.rename(cache.parents[1] / "elsewhere")
    cache.parent.symlink_to(cache.parents[1] / "elsewhere")


def of_another_owner(cache: Path) -> None:
    try:
        os.chown(cache, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give files away")


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "planted",
    [
        *(None, writable_by_others, writable_by_the_group, in_a_writable_folder, in_a_writable_cache),
        *(below_a_writable_root, behind_a_link, in_a_linked_folder, of_another_owner),
    ],
)
def test_26_compiled_files_that_others_can_have_written_are_not_read(
    planted: Callable[[Path], None] | None, ending: str, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("CAPPLAN_CACHE_DIR", str(tmp_path / "root"))
    before = os.umask(0)  # the cache sets modes of its own
    try:
        assert compile_.jit(plus_1)(41) == 42
    finally:
        os.umask(before)
    (file,) = (tmp_path / "root").rglob(f"*.{ending}")
    if planted is not None:
        planted(file)
        compile_._is_cache_usable.cache_clear()
    again = compile_.jit(plus_1)
    assert again(41) == 42
    assert bool(again.stats.cache_hits) == (planted is None)


def test_compiled_kernels_of_the_engine_use_the_checked_cache() -> None:
    from capplan.engine.kernels import _cpu as cpu

    kernels = [each for each in vars(cpu).values() if hasattr(each, "py_func")]
    assert kernels
    assert all(isinstance(each._cache, compile_._Cache) for each in kernels)


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fail a test that blocks."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a workload, a trace, and files of a kind."""
    monkeypatch.chdir(tmp_path)
    for ending in ("", ".jsonl", ".json", ".parquet"):
        OTHERS[kind](tmp_path / f"other{ending}")
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "workload.yaml").write_text(json.dumps(workload_with("")))
    return tmp_path


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_names_no_regular_file_is_refused_at_once(field: str, folder: Path, run) -> None:
    (folder / "workload.yaml").write_text(json.dumps(workload_with(field)))
    assert "other" in error_line(run("plan", "workload.yaml"))


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_a_flag_that_names_no_regular_file_is_refused_at_once(words, folder: Path, run) -> None:
    before = set(folder.iterdir())
    assert "other" in error_line(run(*named(words, "other")))
    assert set(folder.iterdir()) == before


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", ["wf.yaml", "wt2.yaml", "wf3.yaml"])
def test_32_a_fifo_or_a_file_of_the_kernel_is_refused_at_once(name: str, case, run) -> None:
    folder = case("32-blocking-files")
    os.mkfifo(folder / "fifo")
    assert "must be a regular file, not a " in error_line(run("plan", folder / name))


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(("key", "value"), CONFIGS, ids=lambda text: text[:20])
def test_a_model_config_is_refused_by_its_key_before_anything_is_allocated(key, value, run, tmp_path) -> None:
    (tmp_path / "config.json").write_text(with_value(LLAMA, key, value))
    words = ("serve", "--model", tmp_path / "config.json", "--port", 0, "--max-model-len", 128)
    refused = error_line(run(*words))
    assert key.removeprefix("torch_") in refused or "rope" in key or "endless numbers" in refused


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(
            ("negative", "intermediate_size"),
            ("hidden1e9", "hidden_size"),
            ("layers1e7", "num_hidden_layers"),
        ),
        *(("vocab2^40", "vocab_size"), ("eps nan", "rms_norm_eps"), ("rope0", "rope_theta")),
        *(("heads0", "num_attention_heads"), ("headdim3", "head_dim"), ("auto_map", "model_type")),
    ],
)
def test_31_a_model_config_without_bounds_is_refused(name: str, key: str, case, run) -> None:
    file = case("31-model-config") / f"m_{name}" / "config.json"
    refused = error_line(run("serve", "--model", file, "--port", 0, "--max-model-len", 128))
    assert f"{file}: {key}: must" in refused
    assert "(got " in refused


@pytest.mark.usefixtures("in_time")
def test_weights_larger_than_all_memory_are_refused(run, tmp_path) -> None:
    large = {"hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 1024, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **large}))
    refused = error_line(
        run("serve", "--model", tmp_path / "config.json", "--port", 0, "--max-model-len", 128)
    )
    assert "weights: must have weights of at most" in refused


ROOFLINE = ("profile", "roofline", "--gpu", "h200", "--model", "llama-3.1-8b", "-o")


def test_33_an_output_keeps_mode_and_owner_of_the_file_that_it_replaces(run, tmp_path) -> None:
    old = tmp_path / "m.yaml"
    old.touch(0o600)
    with contextlib.suppress(PermissionError):  # only root can give files away
        os.chown(old, 65534, 65534)
    owner = old.stat().st_uid
    written = run(*ROOFLINE, old)
    assert written.exit_code == 0, written.output
    assert old.stat().st_size > 0
    assert (stat.S_IMODE(old.stat().st_mode), old.stat().st_uid) == (0o600, owner)


def test_33_a_new_output_has_the_mode_of_the_umask(tmp_path) -> None:
    before = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "new", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_33_a_loop_of_links_is_an_error_and_nothing_is_replaced(run, tmp_path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "symbolic links" in error_line(run(*ROOFLINE, tmp_path / "a"))
    assert (tmp_path / "a").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", ["FIFO", "socket", "directory", "loop"])
def test_an_output_that_cannot_be_replaced_is_refused_at_once(kind, run, tmp_path) -> None:
    OTHERS[kind](tmp_path / "out")
    assert "out: cannot be written: " in error_line(run(*ROOFLINE, tmp_path / "out"))
    with pytest.raises((InputError, OSError)):
        RecordFile(tmp_path / "out")
    with pytest.raises(InputError):
        RequestFile(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kept", [RecordFile, RequestFile])
def test_records_of_requests_and_steps_keep_modes_and_links(kept, tmp_path) -> None:
    (tmp_path / "target").touch(0o600)
    (tmp_path / "link").symlink_to("target")
    with kept(tmp_path / "link") as file:
        (beside,) = tmp_path.glob(".*")
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
        if isinstance(file, RequestFile):
            file.keep()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size > 0
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".*"))


def test_no_device_is_replaced_by_a_file_of_records() -> None:
    before = Path("/dev/null").stat()
    with pytest.raises(InputError, match="no regular file"):
        RequestFile("/dev/null")
    assert Path("/dev/null").stat().st_rdev == before.st_rdev


@pytest.mark.parametrize("flag", ["--output", "--html"])
@pytest.mark.parametrize("kind", ["nothing"])
def test_an_output_never_replaces_the_workload_that_is_read(flag, folder, run) -> None:
    before = (folder / "workload.yaml").read_bytes()
    os.link("workload.yaml", "same.yaml")
    words = ("plan",) if flag == "--output" else ("compare",)
    refused = error_line(run(*words, "workload.yaml", flag, "same.yaml"))
    assert "must be another file than the one that is read (got 'same.yaml')" in refused
    assert (folder / "workload.yaml").read_bytes() == before


def test_of_two_writers_one_wins_whole(tmp_path) -> None:
    target = tmp_path / "out"
    texts = [letter * 2**20 for letter in "ab"]
    with ThreadPoolExecutor() as pool:
        for written in [pool.submit(write_text_atomic, target, text) for _ in range(5) for text in texts]:
            written.result()
            assert target.read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


TERMINALS = (
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "cp437"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"TERM": "dumb", "COLUMNS": "1", "PYTHONIOENCODING": "ascii:strict"},
)


def shown_by(*words: object) -> tuple[int, str, str]:
    """Return exit status and outputs of a command; bytes that are not UTF-8 are replaced."""
    done = subprocess.run(command(words), env=environment(), capture_output=True, timeout=600)
    return done.returncode, *(each.decode(errors="replace") for each in (done.stdout, done.stderr))


@pytest.mark.parametrize("terminal", TERMINALS, ids=str)
def test_36_characters_that_a_terminal_cannot_show_are_replaced(terminal, tmp_path, monkeypatch) -> None:
    workload = {
        **{"base_model": "meta-llama/Llama-3.1-8B-Instruct", "profile": PROFILE},
        "requests": {"prompt_tokens": {"mean": 9}, "output_tokens": {"mean": 9}},
        "adapters": [{"name": "größe-日本", "rank": 8, "rate_rps": 0.1}],
    }
    (tmp_path / "w.yaml").write_text(json.dumps(workload))
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    words = ("simulate", tmp_path / "w.yaml", "--max-loras", 1, "--duration", 20, "--workers", 1)
    for more in ((), ("--json",)):
        status, stdout, stderr = shown_by(*words, *more)
        assert (status, "Traceback" in stderr) == (0, False), stderr
        assert json.loads(stdout) if more else stdout.strip()
    status, _, stderr = shown_by("simulate", tmp_path / "größe.yaml")
    assert (status, len(stderr.splitlines())) == (2, 1)


def test_36_a_plan_keeps_its_exit_status(case, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = ("plan", case("36-encoding") / "w.yaml", "--no-verify", "--time-limit", "60")
    status, stdout, stderr = shown_by(*words)
    assert (status, "Traceback" in stderr) == (0, False), stderr
    assert stdout.isascii()
    status, stdout, _ = shown_by(*words, "--json")
    assert status == 0
    assert json.loads(stdout)["groups"]
