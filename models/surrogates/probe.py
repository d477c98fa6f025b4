"""What features mean, in numbers: those of two fixed scenarios, kept beside whatever was made from features.

Names alone would not tell data and surrogates of another fluid estimate apart.
"""

from __future__ import annotations

from capplan.models.surrogates.features import feature_vector
from capplan.spec import Adapter, Lengths, Profile, Workload


def feature_probe(profile: Profile) -> list[str]:
    """Return the features of two scenarios of a profile, one that waits for slots and one that does not.

    Four digits tell estimates apart, and are the same on every machine.
    """
    probed = []
    for adapters, a_max in ((48, 6), (12, 16)):
        workload = Workload(
            base_model="probe",
            adapters=tuple(
                Adapter(name=str(i), rank=8 << i % 3, rate_rps=0.05 * (1 + i % 5)) for i in range(adapters)
            ),
            prompt_tokens=Lengths(mean=250, std=200),
            output_tokens=Lengths(mean=230, std=120),
            length_correlation=-0.3,
        )
        probed += feature_vector(
            workload,
            profile,
            a_max=a_max,
            s_max=32,
            max_num_seqs=128,
            max_num_batched_tokens=1024,
            gpu_memory_utilization=0.9,
        ).tolist()
    return [f"{value:.4g}" for value in probed]
