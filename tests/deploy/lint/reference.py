"""The page of the rules, made from their table: ``python -m tests.deploy.lint.reference`` writes it."""

from pathlib import Path

from capplan.deploy.lint import RULES
from capplan.deploy.lint._rule import REFERENCE

PAGE = Path(__file__).resolve().parents[3] / REFERENCE
KINDS = {
    "0": "any file",
    "1": "plans",
    "2": "servers, most of them of vLLM",
    "3": "servers of SGLang",
    "4": "Kubernetes controllers and the chart of the production-stack",
    "5": "Ray Serve LLM",
    "6": "workloads",
    "7": "adapter folders",
    "8": "running servers",
}
TOP = """\
# Rules of `capplan lint`

```console
$ capplan lint workload.yaml plan.json deploy
$ capplan lint values.yaml http://gpu-0:8000 --plan plan.json
```

A line per finding names the input, its line, the level, the rule, the value and the next step. Exit status:
0 without errors, 1 with errors (`--strict`: with warnings too), 2 for an input that is not understood.
`--select` and `--ignore` choose rules by id; `--format` writes `json`, `sarif` (2.1.0) or `github`
(annotations). From Python: `capplan.deploy.lint.lint`.

| first digit | rules on |
|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    rows = "".join(f"| {digit} | {kind} |\n" for digit, kind in KINDS.items())
    sections = (
        f"\n## {rule.id}\n\n{rule.level.capitalize()}: {rule.title}. {rule.reason}\n\nFix: {rule.fix}.\n"
        for rule in RULES
    )
    return TOP + rows + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
