import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.adapter_fleet import Fleet

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads from a hub

torch = pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
for needed in ("aiohttp", "safetensors", "tokenizers", "uvicorn"):
    pytest.importorskip(needed, reason=f"the engine needs {needed} (extra `engine`)")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads only slow tiny models down."""
    torch.set_num_threads(1)


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> "Iterator[Fleet]":
    """Return a registry with adapters, without servers, which have the POOL_PARAMS of the module."""
    from tests.engine.adapter_fleet import PATIENT, Fleet

    made = Fleet(tmp_path, params=getattr(request.module, "POOL_PARAMS", PATIENT))
    yield made
    made.registry.close()


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the answer of each adapter of the fleet."""
    from tests.engine.adapter_fleet import right_answers

    return right_answers(tmp_path_factory.mktemp("right"))
