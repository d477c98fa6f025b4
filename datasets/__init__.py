"""Shipped profiles, each with where its numbers come from, and their loader."""

from capplan.datasets._profile_files import list_profiles, load_profile, surrogate_path

__all__ = ["list_profiles", "load_profile", "surrogate_path"]
