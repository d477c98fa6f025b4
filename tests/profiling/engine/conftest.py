import pytest

pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
