"""The parts of an operator graph as JSON values: what repeats, kernels and shapes, is written once
and referred to by index.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lightning_topt.graph.operators import Block, Kernel, Op, Parameter, TensorEdge
from lightning_topt.graph.quantities import Amount, TensorSpec
from lightning_topt.graph.step_tensors import Module, ModuleCall, Step, StepTensor

VERSION = 2
PLAIN = ("model", "batch_size", "buffer_bytes", "batch_scaling", "whole_model")


def encode_parts(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an OpGraph as a JSON value."""
    table = _Table()
    step: Step = graph["step"]
    return {
        "version": VERSION,
        **{name: graph[name] for name in PLAIN},
        "input_bytes": _amount(graph["input_bytes"]),
        "unused": graph["unused"],
        "parameters": [_fields(parameter) for parameter in graph["parameters"]],
        "blocks": [_fields(block) for block in graph["blocks"]],
        "ops": [table.op(op) for op in graph["ops"]],
        "edges": [[edge.source, edge.target, table.spec(edge.tensor)] for edge in graph["edges"]],
        "step": {
            **_fields(step),
            "tensors": [table.tensor(tensor) for tensor in step.tensors],
            "calls": [list(_fields(call).values()) for call in step.calls],
            "modules": [list(_fields(module).values()) for module in step.modules],
            "workspaces": [[position, _amount(amount)] for position, amount in step.workspaces],
        },
        "kernels": [
            {**_fields(k), **_amounts(k, "flops", "bytes", "allocated")}
            for k in table.kernels.values()
        ],
        "specs": [list(_fields(spec).values()) for spec in table.specs],
    }


def decode_parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an OpGraph from what `encode_parts` returned. Raises ValueError on
    another version.
    """
    if data.get("version") != VERSION:
        raise ValueError(
            f"this graph was not written by version {VERSION} of the format; capture it again"
        )
    specs = [
        TensorSpec(tuple(shape), dtype, batch_dim) for shape, dtype, batch_dim in data["specs"]
    ]
    kernels = [
        Kernel(**{**k, **_read_amounts(k, "flops", "bytes", "allocated")}) for k in data["kernels"]
    ]
    return {
        **{name: data.get(name) for name in PLAIN},
        "input_bytes": Amount(*data["input_bytes"]),
        "unused": tuple(data["unused"]),
        "parameters": tuple(
            Parameter(**_tuples(p, "shape", "aliases")) for p in data["parameters"]
        ),
        "blocks": tuple(Block(**block) for block in data["blocks"]),
        "ops": tuple(_read_op(op, specs, kernels) for op in data["ops"]),
        "edges": tuple(
            TensorEdge(source, target, specs[spec]) for source, target, spec in data["edges"]
        ),
        "step": _read_step(data["step"], specs),
    }


class _Table:
    """Numbers for kernels and shapes."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.specs: dict[TensorSpec, int] = {}
        self._numbers: dict[str, int] = {}

    def spec(self, spec: TensorSpec) -> int:
        return self.specs.setdefault(spec, len(self.specs))

    def kernel(self, kernel: Kernel) -> int:
        key = f"{kernel} {json.dumps(kernel.arguments)}"
        self.kernels.setdefault(key, kernel)
        return self._numbers.setdefault(key, len(self._numbers))

    def op(self, op: Op) -> dict[str, Any]:
        return {
            **_fields(op),
            **_amounts(op, "saved_bytes"),
            "outputs": [self.spec(spec) for spec in op.outputs],
            "forward": [self.kernel(kernel) for kernel in op.forward],
            "backward": [self.kernel(kernel) for kernel in op.backward],
        }

    def tensor(self, tensor: StepTensor) -> list[Any]:
        return list(
            {
                **_fields(tensor),
                **_amounts(tensor, "bytes"),
                "spec": self.spec(tensor.spec),
            }.values()
        )


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _amount(amount: Amount) -> list[float]:
    return [amount.fixed, amount.per_sample]


def _amounts(value: Any, *names: str) -> dict[str, Any]:
    return {name: _amount(getattr(value, name)) for name in names}


def _read_amounts(data: Mapping[str, Any], *names: str) -> dict[str, Amount]:
    return {name: Amount(*data[name]) for name in names}


def _tuples(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**data, **{name: tuple(data[name]) for name in names}}


def _read_op(data: Mapping[str, Any], specs: list[TensorSpec], kernels: list[Kernel]) -> Op:
    calls = {
        name: tuple(kernels[index] for index in data[name]) for name in ("forward", "backward")
    }
    outputs = tuple(specs[index] for index in data["outputs"])
    return Op(
        **{
            **_tuples(data, "parameters", "stack"),
            **_read_amounts(data, "saved_bytes"),
            **calls,
            "outputs": outputs,
        }
    )


def _read_step(data: Mapping[str, Any], specs: list[TensorSpec]) -> Step:
    return Step(
        batch_sizes=tuple(data["batch_sizes"]),
        order=tuple(data["order"]),
        backward_start=data["backward_start"],
        tensors=tuple(
            StepTensor(producer, specs[spec], Amount(*size), *rest)
            for producer, spec, size, *rest in data["tensors"]
        ),
        calls=tuple(
            ModuleCall(module, first, end, tuple(inputs), tuple(outputs), *rest)
            for module, first, end, inputs, outputs, *rest in data["calls"]
        ),
        modules=tuple(Module(*module) for module in data["modules"]),
        workspaces=tuple((position, Amount(*amount)) for position, amount in data["workspaces"]),
    )
