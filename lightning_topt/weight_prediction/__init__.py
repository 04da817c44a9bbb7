"""Weights for the passes of a continuous pipeline: predicted, stashed, or as they are.

``make_prediction(name)`` gives a rule, ``rule.on(optimizer, stage=..., num_stages=...)`` puts it to
work on a stage, and ``with stage_prediction.forward(...):`` a pass finds its weights in place.
"""

from lightning_topt.weight_prediction.rules import (
    DEFAULTS,
    PREDICTIONS,
    Default,
    MultiStep,
    Nesterov,
    NoPrediction,
    Prediction,
    Rates,
    SpecTrain,
    StagePrediction,
    TwoVersions,
    WeightStashing,
    default_prediction,
    make_prediction,
    prediction_to_value,
)

__all__ = [
    "DEFAULTS",
    "PREDICTIONS",
    "Default",
    "MultiStep",
    "Nesterov",
    "NoPrediction",
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
