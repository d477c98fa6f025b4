"""Profiles composed from measured operators or layers, see `compose_profile`."""

from capplan.models.compose._decoder import Decoder, decoder_of, known_decoder
from capplan.models.compose._layers import layer_times
from capplan.models.compose._profile import compose_profile, operator_times, profile_of_times
from capplan.models.compose._tables import SYSTEMS, operator_tables

__all__ = [
    "SYSTEMS",
    "Decoder",
    "compose_profile",
    "decoder_of",
    "known_decoder",
    "layer_times",
    "operator_tables",
    "operator_times",
    "profile_of_times",
]
