"""Build a workload, see what the number of adapter slots does to one GPU, and plan."""

from capplan import Adapter, Lengths, Workload, load_profile, plan, simulate

profile = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
workload = Workload(
    base_model="meta-llama/Llama-3.1-8B-Instruct",
    adapters=[
        *(Adapter(name=f"small-{i}", rank=8, rate_rps=0.15) for i in range(40)),
        *(Adapter(name=f"large-{i}", rank=64, rate_rps=0.4) for i in range(8)),
    ],
    prompt_tokens=Lengths(mean=600, std=500),
    output_tokens=Lengths(mean=150, std=120),
    slo={"ttft_p99_s": 3.0},
)

print("one GPU, by adapter slots:")
for a_max in (8, 16, 32, 48):
    run = simulate(workload, profile, a_max=a_max, s_max=64, duration_s=1800.0, seed=0)
    print(
        f"  {a_max:2d} slots: {run.throughput_tok_s:6,.0f} tok/s, {run.served_fraction:6.1%} served, "
        f"TTFT p99 {run.ttft_s_p99:6.2f} s, room for {run.kv_tokens:,} KV tokens"
    )

result = plan(workload, gpus=4, profile=profile)
print(f"plan: {result.totals.gpus} GPU(s), at least {result.totals.lower_bound_gpus} needed")
for group in result.groups:
    binds = group.binds.note if group.binds else "nothing binds"
    print(
        f"  {group.id}: {len(group.adapters)} adapters in {group.engine_args.max_loras} slots of rank "
        f"{group.engine_args.max_lora_rank}, TTFT p99 {group.predicted.ttft_s.p99:.2f} s; {binds}"
    )
print("verified" if result.verification.ok else "not verified")
