from ._candidates import FAMILIES, PAPER_FAMILIES
from ._data import (
    MANIFEST,
    OUTCOMES,
    DatasetRequest,
    DatasetResult,
    Manifest,
    Shard,
    content_digest,
    read_manifest,
    read_tables,
    require_columns,
    schema,
)
from ._length_predictor import PredictorOptions, train_predictor
from ._train import Trained, TrainingOptions, train_surrogates

__all__ = [
    "FAMILIES",
    "MANIFEST",
    "OUTCOMES",
    "PAPER_FAMILIES",
    "DatasetRequest",
    "DatasetResult",
    "Manifest",
    "PredictorOptions",
    "Shard",
    "Trained",
    "TrainingOptions",
    "content_digest",
    "read_manifest",
    "read_tables",
    "require_columns",
    "schema",
    "train_predictor",
    "train_surrogates",
]
