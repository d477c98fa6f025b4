import os

import pytest

torch = pytest.importorskip("torch", reason="kernels are timed with torch (extra `engine`)")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
