from ._lint import FORMATS, lint
from ._rule import Finding, Rule
from ._rules import RULES

__all__ = ["FORMATS", "RULES", "Finding", "Rule", "lint"]
