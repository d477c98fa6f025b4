"""Version of the installed distribution."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Return the version, or that of a bare checkout."""
    try:
        return metadata.version("capplan")
    except metadata.PackageNotFoundError:
        return "0.0.0+checkout"
