"""Compile the entries that most tests call, into the cache on disk: ``python -m tests.compile``.

Otherwise every test process that finds none in the cache compiles the same ones.
"""

from capplan import Adapter, Lengths, Workload, load_profile, load_surrogate, simulate
from capplan.serving import Limits, commit, finish, new_state, schedule, submit
from capplan.twin.cluster import Instance, simulate_cluster

PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"


def main() -> None:
    profile = load_profile(PROFILE)
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=1.0) for i in range(2)],
        prompt_tokens=Lengths(mean=20, std=10),
        output_tokens=Lengths(mean=10, std=5),
    )
    simulate(workload, profile, a_max=2, s_max=8, duration_s=5.0)
    limits = Limits(8, 64, 64, 2, 4, 4, 0, 0, 0)
    state = new_state(8, 4, 64, limits)
    row = submit(state, limits, 0, 0, 8, 2, 0, 0)
    schedule(state, limits)
    commit(state, limits)
    finish(state, limits, row)
    simulate_cluster(workload, [Instance(profile, 2, 8)] * 2, router="least-loaded", duration_s=5.0)
    load_surrogate(profile).predict(workload, a_max=2, s_max=8)


if __name__ == "__main__":
    main()
