from ._export import DEFAULT_PORT, EXPORTERS, Exporter, export, find_exporter
from ._vllm import TOP_NAMES, vllm_files

__all__ = ["DEFAULT_PORT", "EXPORTERS", "TOP_NAMES", "Exporter", "export", "find_exporter", "vllm_files"]
