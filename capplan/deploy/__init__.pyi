from ._export import EXPORTERS, Exporter, export
from ._vllm import TOP_NAMES, download_notes, vllm_files

__all__ = ["EXPORTERS", "TOP_NAMES", "Exporter", "download_notes", "export", "vllm_files"]
