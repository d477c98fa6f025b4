from ._decoder import Decoder, decoder_of, known_decoder, quantized_on_loading, with_weights
from ._forward import layer_times
from ._operators import SYSTEMS, operator_tables
from ._profile import compose_profile, operator_times, profile_of_times

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
    "quantized_on_loading",
    "with_weights",
]
