import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads from a hub

torch = pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
pytest.importorskip("safetensors", reason="the engine needs safetensors (extra `engine`)")
pytest.importorskip("tokenizers", reason="the engine needs tokenizers (extra `engine`)")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads only slow tiny models down."""
    torch.set_num_threads(1)
