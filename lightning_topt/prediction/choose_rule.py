"""Rules by name, as plans and command lines give them, and the default of each optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.prediction.extrapolation import MultiStep, PipeOptim, SpecTrain
from lightning_topt.prediction.rule import Prediction
from lightning_topt.prediction.stashing import Nesterov, TwoVersions, WeightStashing
from lightning_topt.prediction.true_weights import NoPrediction, PipeMare

_RULES: tuple[type[Prediction], ...] = (
    *(SpecTrain, MultiStep, PipeOptim, WeightStashing),
    *(TwoVersions, Nesterov, PipeMare, NoPrediction),
)
PREDICTIONS: Mapping[str, type[Prediction]] = MappingProxyType({rule.name: rule for rule in _RULES})
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {"SGD": "spectrain", "Adam": "spectrain", "AdamW": "spectrain", "NAdam": "nesterov"}
)
OTHERWISE = "stash"  # for optimizers that no rule knows


def make_prediction(value: str | Mapping[str, Any] | Prediction) -> Prediction:
    """Return a rule from its name, from ``{"rule": name, option: value, ...}``, or as it is.

    Raises ValueError for names and options that are not there.
    """
    if isinstance(value, Prediction):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"rule": value}
    rule = PREDICTIONS[
        check_choice(options.pop("rule", None), name="prediction", allowed=PREDICTIONS)
    ]
    known = [field.name for field in fields(rule)]
    for option in options:
        if option not in known:
            offered = f"has the options {', '.join(known)}" if known else "has no options"
            raise ValueError(f"prediction {rule.name!r} {offered}, got {option!r}")
    return rule(**options)


def prediction_to_value(prediction: Prediction) -> str | dict[str, Any]:
    """Return what `make_prediction` makes `prediction` of: its name, with those options that are
    not as by default.
    """
    values = {field.name: getattr(prediction, field.name) for field in fields(prediction)}
    options = {
        field.name: values[field.name]
        for field in fields(prediction)
        if values[field.name] != field.default
    }
    return {"rule": prediction.name, **options} if options else prediction.name


def default_prediction(optimizer: Optimizer | str) -> Prediction:
    """Return the rule for an optimizer, or for the name of its class, that came out best in
    docs/weight_prediction.md.

    Weight stashing where a rule of its own does not know this one.
    """
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    rule = make_prediction(DEFAULTS.get(name, OTHERWISE))
    try:
        if isinstance(optimizer, Optimizer):
            rule.on(optimizer, stage=0, num_stages=2)
    except ValueError:
        return make_prediction(OTHERWISE)
    return rule
