"""Adapter registries that several files test."""

from pathlib import Path
from typing import Any

import pytest

from capplan.registry import AdapterRegistry, RegisteredAdapter


def entry(name: str, version: int = 0, **fields: Any) -> RegisteredAdapter:
    """Return an adapter of a registry; versions differ in the digest."""
    known = {"base_model": "org/model", "rank": 8, "digest": f"{version:064x}", "location": f"s3://{name}"}
    return RegisteredAdapter(**{"name": name} | known | fields)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a registry with the adapter a."""
    path = tmp_path / "adapters.db"
    with AdapterRegistry(path, create=True) as registry:
        registry.add(entry("a"))
    return path
