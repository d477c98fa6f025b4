import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may go to a hub

torch = pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
pytest.importorskip("safetensors", reason="the engine needs safetensors (extra `engine`)")
pytest.importorskip("tokenizers", reason="the engine needs tokenizers (extra `engine`)")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are tiny: threads would only wait for each other, and for other test processes."""
    torch.set_num_threads(1)
