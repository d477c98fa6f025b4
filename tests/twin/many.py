"""Compares the forms of the twin on seeded scenarios: ``python -m tests.twin.many COUNT [FIRST_SEED]``."""

import sys
import time
from collections import Counter

from capplan.twin.instance import run
from tests.twin.comparison import assert_forms_agree, rules_in
from tests.twin.scenarios import seeded_scenario


def main(count: int, first_seed: int = 0) -> int:
    """Print the scenarios and steps of every set of rules; return 1 if both twins differ."""
    scenarios: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    broken: list[str] = []
    began_s = time.perf_counter()
    for seed in range(first_seed, first_seed + count):
        scenario = seeded_scenario(seed)
        rules = rules_in(scenario.limits)
        scenarios[rules] += 1
        steps[rules] += int(run(scenario).counts.steps)
        try:
            assert_forms_agree(scenario)
        except AssertionError as error:
            broken.append(f"seed {seed} ({rules}): {' '.join(str(error).split())[:300]}")
    for rules in sorted(scenarios):
        sys.stdout.write(f"{scenarios[rules]:7} scenarios {steps[rules]:9} steps  {rules}\n")
    seconds = time.perf_counter() - began_s
    sys.stdout.write(f"{count:7} scenarios {steps.total():9} steps  in all, {seconds:.0f} s\n")
    sys.stdout.write("".join(f"differs: {line}\n" for line in broken))
    sys.stdout.write(f"{len(broken)} differences\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
