from ._deployed import diff_files, diff_server
from ._export import DEFAULT_PORT, EXPORTERS, export, find_exporter
from ._launch import TOP_NAMES
from ._target import Exporter, Loss, Setting
from ._vllm import vllm_files

__all__ = [
    "DEFAULT_PORT",
    "EXPORTERS",
    "TOP_NAMES",
    "Exporter",
    "Loss",
    "Setting",
    "diff_files",
    "diff_server",
    "export",
    "find_exporter",
    "vllm_files",
]
