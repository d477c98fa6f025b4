"""Adapter registry: adapters of a fleet, where their weights are, and the servers that store them."""

from capplan.registry._adapter import RegisteredAdapter, digest_of, read_adapter
from capplan.registry._database import RegistryUnavailableError
from capplan.registry._registry import AdapterRegistry, with_locations

__all__ = [
    "AdapterRegistry",
    "RegisteredAdapter",
    "RegistryUnavailableError",
    "digest_of",
    "read_adapter",
    "with_locations",
]
