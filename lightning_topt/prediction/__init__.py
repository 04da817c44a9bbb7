"""Weights for the passes of a continuous pipeline: predicted, stashed, or as they are.

make_prediction -> Prediction.on(optimizer, stage=, num_stages=) -> with
stage_prediction.forward(...): a pass
"""

from lightning_topt.prediction.choose_rule import (
    DEFAULTS,
    PREDICTIONS,
    default_prediction,
    make_prediction,
    prediction_to_value,
)
from lightning_topt.prediction.extrapolation import MultiStep, PipeOptim, SpecTrain
from lightning_topt.prediction.rule import Prediction, Rates, StagePrediction
from lightning_topt.prediction.stashing import Nesterov, TwoVersions, WeightStashing
from lightning_topt.prediction.true_weights import NoPrediction, PipeMare

__all__ = [
    "DEFAULTS",
    "PREDICTIONS",
    "MultiStep",
    "Nesterov",
    "NoPrediction",
    "PipeMare",
    "PipeOptim",
    "Prediction",
    "Rates",
    "SpecTrain",
    "StagePrediction",
    "TwoVersions",
    "WeightStashing",
    "default_prediction",
    "make_prediction",
    "prediction_to_value",
]
