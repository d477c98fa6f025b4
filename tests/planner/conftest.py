from collections.abc import Callable

import pytest

from capplan import Adapter, Lengths, Profile, Workload, load_profile

PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(scope="session")
def profile() -> Profile:
    return load_profile(PROFILE)


@pytest.fixture
def unsurrogated(profile: Profile) -> Profile:
    """The same numbers under a name that no surrogate is shipped for."""
    return profile.replace(name="nobody/trained/surrogates-for-this")


@pytest.fixture(scope="session")
def workload() -> Callable[..., Workload]:
    """Return a maker of workloads: adapters as (name, rank, rate), other fields by name."""

    def make(*adapters: tuple[str, int, float], **fields: object) -> Workload:
        return Workload(
            **{
                "base_model": MODEL,
                "profile": PROFILE,
                "gpus": {"count": 4},
                "prompt_tokens": Lengths(mean=400, std=300),
                "output_tokens": Lengths(mean=100, std=60),
                "adapters": tuple(Adapter(name=n, rank=rank, rate_rps=rate) for n, rank, rate in adapters),
                **fields,
            }
        )

    return make
