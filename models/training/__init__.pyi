from ._candidates import FAMILIES, PAPER_FAMILIES, RelativeRegressor
from ._data import (
    MANIFEST,
    OUTCOMES,
    DatasetRequest,
    DatasetResult,
    Manifest,
    Shard,
    TrainingTable,
    content_digest,
    read_manifest,
    read_tables,
    require_columns,
    schema,
)
from ._evaluation import Task, grouped_folds, macro_f1, predictions
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
    "RelativeRegressor",
    "Shard",
    "Task",
    "Trained",
    "TrainingOptions",
    "TrainingTable",
    "content_digest",
    "grouped_folds",
    "macro_f1",
    "predictions",
    "read_manifest",
    "read_tables",
    "require_columns",
    "schema",
    "train_predictor",
    "train_surrogates",
]
