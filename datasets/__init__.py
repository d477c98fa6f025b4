"""Shipped profiles, each with where its numbers come from, and their loader."""

from capplan.datasets.profile_files import list_profiles, load_profile

__all__ = ["list_profiles", "load_profile"]
