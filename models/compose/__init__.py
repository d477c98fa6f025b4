"""Profiles composed from measured operators, see `compose_profile`."""

from capplan.models.compose.decoder import Decoder, decoder_of
from capplan.models.compose.profile import compose_profile
from capplan.models.compose.tables import SYSTEMS, operator_tables

__all__ = ["SYSTEMS", "Decoder", "compose_profile", "decoder_of", "operator_tables"]
