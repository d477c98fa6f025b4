from ._adapter import ADAPTER_FILES, RegisteredAdapter, RegisteredServer, digest_of, file_digest, read_adapter
from ._database import RegistryUnavailableError
from ._registry import AdapterRegistry, with_locations

__all__ = [
    "ADAPTER_FILES",
    "AdapterRegistry",
    "RegisteredAdapter",
    "RegisteredServer",
    "RegistryUnavailableError",
    "digest_of",
    "file_digest",
    "read_adapter",
    "with_locations",
]
