from capplan.datasets import list_profiles, load_profile
from capplan.models import comparable_rows
from capplan.spec import Profile


def nearest(name: str) -> tuple[str, str, int, bool]:
    rows = comparable_rows(load_profile(name))[0]
    return rows.model, rows.gpu, rows.tp, rows.is_fitted


def test_the_nearest_rows_are_of_the_same_model_gpu_and_tp() -> None:
    assert nearest("h100-80g/qwen3-14b/vllm-0.15.1") == ("Qwen3-14B", "h100-80g", 1, True)
    assert nearest("h100-80g/llama-3.1-70b/vllm-0.15.1-tp4-fp8") == ("Llama-3.1-70B", "h100-80g", 4, False)
    assert nearest("b200/gpt-oss-120b/vllm-0.19.0-tp4") == ("gpt-oss-120b", "b200", 4, False)


def test_another_gpu_is_compared_with_rows_that_left_theirs_out() -> None:
    rows = comparable_rows(load_profile("a100-80g/llama-3.1-8b/vllm-0.15.1"))[0]
    assert (rows.model, rows.basis) == ("Llama-3.1-8B", "gpu left out")


def test_every_shipped_composed_profile_has_rows_of_its_kind() -> None:
    def kinds(profile: Profile) -> bool:
        first = comparable_rows(profile)[0]
        return first.experts == (profile.model.experts is not None)

    profiles = [load_profile(each) for each in list_profiles()]
    assert all(kinds(each) for each in profiles if each.provenance.kind == "composed")
