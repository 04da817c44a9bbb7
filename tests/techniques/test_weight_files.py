"""Weights on a disk: files as safetensors has them, and models on the meta device that begin so."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.plan.parallel_plan import PlanError, uniform_plan
from lightning_topt.techniques.technique import RunOptions
from lightning_topt.techniques.weight_files import DTYPES, INDEX, stored_weights, write_weights
from tests.plugins.trainer_ranks import on_ranks
from tests.techniques.test_first_values import CPU, LEVELS, batch_norm, plan_of, tensors, tied

safetensors = pytest.importorskip("safetensors.torch", reason="no safetensors")
FLOAT = {name: torch.randn(5, 3) for name in "abcdef"}


def write(path: Path, values: dict[str, Tensor], most_bytes: float = math.inf) -> list[Path]:
    shapes = {name: (value.dtype, value.shape) for name, value in values.items()}
    return write_weights(path, shapes, values.__getitem__, most_bytes=most_bytes)


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    values = {code: (torch.rand(3, 5) * 9).to(dtype) for code, dtype in DTYPES.items()}
    values |= {"none": torch.empty(0, 4), "one": torch.tensor(7.0), "odd": torch.ones(3).bool()}
    (ours,), theirs = write(tmp_path / "ours.safetensors", values), tmp_path / "theirs.safetensors"
    assert not list(tmp_path.glob("*.unfinished"))
    read = safetensors.load_file(ours)
    safetensors.save_file(values, theirs)
    for file in (ours, theirs):
        stored = stored_weights(file)
        assert {*stored} == {*values} == {*read}
        for name, value in values.items():
            assert torch.equal(stored[name].read(), value) and torch.equal(read[name], value), name
            if name in DTYPES:
                assert torch.equal(stored[name].read(range(1, 3)), value[1:3])


def test_large_models_have_several_files_and_an_index(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, FLOAT)
    files = write(path, FLOAT, most_bytes=130)  # two tensors of 60 bytes in each
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [file.name for file in files] == names and not path.exists()
    index = json.loads((tmp_path / f"model{INDEX}").read_text())
    assert index["metadata"] == {"total_size": 360} and index["weight_map"]["c"] == names[1]
    for place in (tmp_path, tmp_path / f"model{INDEX}"):
        assert all(torch.equal(t.read(), FLOAT[name]) for name, t in stored_weights(place).items())
    write(path, FLOAT)
    assert not (tmp_path / f"model{INDEX}").exists()


class Headed(nn.Module):
    """A model, and what its weights do not have; a part of it was made with values."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.head, self.net = nn.Linear(4, 2), net
        self.net.register_buffer("mask", torch.zeros(3, device="cpu"))


def begin(level: int, module: nn.Module, given: Any) -> tuple[Engine, list[str]]:
    engine = Engine(plan_of(level, 2), module, device=CPU, options=RunOptions(first_values=given))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.apply()
    return engine, [str(each.message) for each in said if "topt: " in str(each.message)]


def read_rows(rank: int, folder: Path) -> list[list[str]]:
    found = []
    for level in LEVELS:
        for make, name in ((tied, "tied"), (batch_norm, "batch_norm")):
            whole = torch.load(folder / f"{name}.pt")
            with torch.device("meta"):
                module = Headed(make())
            given = folder / f"{name}.safetensors"
            engine, said = begin(level, module, given if level > 1 else {"net": str(given)})
            values = tensors(module.net)
            for key, value in whole.items():
                assert torch.equal(values[key], value.to(values[key].dtype)), (level, key)
            assert not tensors(module)["head.weight"].isnan().any()
            found.append(said)
            engine.close()
    return found


def test_ranks_read_what_they_keep(tmp_path: Path) -> None:
    for make in (tied, batch_norm):
        module = make()
        module.register_buffer("mask", torch.ones(3))
        state = {name: value.detach() for name, value in module.state_dict().items()}
        # a tied one has one name, as in transformers' files
        once = {id(p): name for name, p in module.state_dict(keep_vars=True).items()}
        if make is tied:  # in other numbers, which are cast
            state = {name: value.bfloat16() for name, value in state.items()}
        torch.save(state, tmp_path / f"{make.__name__}.pt")
        stored = {name: state[name] for name in once.values()} | {"old.bias": torch.ones(1)}
        safetensors.save_file(stored, tmp_path / f"{make.__name__}.safetensors")
    first, second = on_ranks(read_rows, tmp_path)
    for said in first:
        drawn, unread = said
        assert "no file of first_values has head.weight, head.bias: " in drawn
        assert "has old.bias, which the model does not have" in unread
    assert not any(second)


def refuse(rank: int, cases: list[tuple[Any, str]]) -> None:
    for given, words in cases:
        with torch.device("meta"):
            module = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})
        options = RunOptions(first_values=given)
        engine = Engine(uniform_plan(3, data_parallel_size=2), module, device=CPU, options=options)
        with pytest.raises(PlanError, match=words):
            engine.apply()


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = {name: tmp_path / f"{name}.safetensors" for name in ("names", "shape", "cut", "text")}
    write(path["names"], FLOAT)
    write(path["shape"], {"weight": torch.ones(5, 3), "bias": torch.ones(4)})
    path["cut"].write_bytes(path["names"].read_bytes()[:-4])
    path["text"].write_text("weights of a model")
    (tmp_path / "empty").mkdir()
    refused = "weights cannot be read from .*"
    cases: list[tuple[Any, str]] = [
        (tmp_path / "empty", "has no weights: give a folder"),
        (tmp_path / "none.safetensors", f"{refused}FileNotFoundError"),
        (path["cut"], f"{refused}is not whole.*give a whole safetensors file"),
        (path["text"], f"{refused}no such header, or is cut off"),
        (tmp_path, f"{refused}"),
        (path["names"], r"no tensor in .* \('a', ...\) has the name"),
        ({"c": path["shape"]}, r"no tensor in .* \('weight', ...\) has the name"),
        (path["shape"], "may be those of 'a' or 'b': say of which they"),
        (
            {"a": path["shape"]},
            re.escape(
                "'a.weight' has the shape (4, 3), and 'weight' in shape.safetensors has (5, 3)"
            ),
        ),
    ]
    on_ranks(refuse, cases)
