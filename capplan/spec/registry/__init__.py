"""Adapter registry: adapters of a fleet, where their weights are, and the servers that store them."""

from capplan.spec.registry.adapter import RegisteredAdapter, digest_of, read_adapter
from capplan.spec.registry.database import RegistryUnavailableError
from capplan.spec.registry.registry import AdapterRegistry, with_locations

__all__ = [
    "AdapterRegistry",
    "RegisteredAdapter",
    "RegistryUnavailableError",
    "digest_of",
    "read_adapter",
    "with_locations",
]
