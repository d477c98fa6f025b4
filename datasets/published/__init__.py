"""Published measurements of vLLM 0.8.5 on one H100 as input tables of `capplan calibrate`.

Source: Agullo et al., arXiv 2508.08343; tables extracted from GPULLMAdapterOptimization, commit bae36e2
(Apache-2.0). The modules select and convert; they fit nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
