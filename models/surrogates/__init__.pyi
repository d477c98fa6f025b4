from ._compiled import STARVED_PROBABILITY, CompiledSurrogate, PackedTrees, compile_surrogate
from ._features import (
    FEATURES,
    HORIZON_S,
    MAX_IN_FLIGHT,
    common_inputs,
    feature_of,
    feature_probe,
    feature_vector,
    feature_vectors,
    gpu_limits,
    steady_share,
    unsupported_workload,
)
from ._files import KINDS, load_surrogate, profile_digest, surrogate_bytes
from ._greedy_fill import AdapterQueue, FillRules, Scratch, SlotNumbers, fill_gpu, scratch_arrays
from ._surrogate import COVERAGE, Surrogate, SurrogateAnswer
from ._tree import LOG_OVER_EXPECTED, Tree
from ._tree_export import EXPECTED, DecisionRule, compile_tree, decision_rules, export_python, export_svg

__all__ = [
    "COVERAGE",
    "EXPECTED",
    "FEATURES",
    "HORIZON_S",
    "KINDS",
    "LOG_OVER_EXPECTED",
    "MAX_IN_FLIGHT",
    "STARVED_PROBABILITY",
    "AdapterQueue",
    "CompiledSurrogate",
    "DecisionRule",
    "FillRules",
    "PackedTrees",
    "Scratch",
    "SlotNumbers",
    "Surrogate",
    "SurrogateAnswer",
    "Tree",
    "common_inputs",
    "compile_surrogate",
    "compile_tree",
    "decision_rules",
    "export_python",
    "export_svg",
    "feature_of",
    "feature_probe",
    "feature_vector",
    "feature_vectors",
    "fill_gpu",
    "gpu_limits",
    "load_surrogate",
    "profile_digest",
    "scratch_arrays",
    "steady_share",
    "surrogate_bytes",
    "unsupported_workload",
]
