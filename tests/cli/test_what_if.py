"""`topt plan` over several machines: what it chooses, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.cli import plan, what_if
from lightning_topt.cli.main import as_hydra_reads
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.cli.test_main import TINY
from tests.forked_command import forked_topt as topt

SMALL = [*TINY, "data.batch_size=4", "pipeline=false", "tensor=false"]


def command(folder: Path, *arguments: str) -> None:
    """Run a command as Hydra does, in this process."""
    words = [*SMALL, *as_hydra_reads(arguments), f"hydra.runtime.output_dir={folder}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("plan", overrides=words, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        plan.run(config)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "scenarios.json").read_text())
    return found


def best(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record(folder)["estimates"]
    return found


def test_several_clusters_counts_and_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cluster=[a100_8x8,h100_2x8]", "device_counts=[8,32]", "batch_size=[32,64]"]
    command(tmp_path, *arguments, "work.samples=1e6", "accumulate=1")
    estimates = best(tmp_path)
    kinds = {(e["cluster"], e["devices"], e["batch_size"]) for e in estimates}
    assert len(kinds) == 2 * 2 + 1 * 2, "32 devices are more than h100_2x8 has"
    assert all(e["money"] and e["run_seconds"] for e in estimates)
    (chosen,) = [e for e in estimates if e["chosen"]]
    assert chosen["money"] == min(e["money"] for e in estimates)
    notes = record(tmp_path)["notes"]
    assert len(notes) == 2 and all(
        "Left out: 32 x h100_2x8" in note and "16" in note for note in notes
    )
    assert record(tmp_path)["reason"].startswith(f"{chosen['devices']} x {chosen['cluster']}")
    assert ParallelPlan.load(tmp_path / "plan.yaml").mesh.size == chosen["devices"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "the cheapest of" in printed and "times may be off by" in printed


def test_searches_side_by_side_find_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["cluster=[a100_8x8,h100_2x8]", "device_counts=[8]", "accumulate=1"]
    for cores in (1, 3):
        (tmp_path / str(cores)).mkdir()
        monkeypatch.setattr(what_if, "usable_cores", lambda cores=cores: cores)
        command(tmp_path / str(cores), *arguments, "batch_size=32", "work.tokens=1e9")
    alone, together = (record(tmp_path / str(cores)) for cores in (1, 3))
    assert len(best(tmp_path / "3")) == 2
    assert together == alone
    plans = [ParallelPlan.load(tmp_path / str(cores) / "plan.yaml") for cores in (1, 3)]
    assert plans[0] == plans[1]
    for each in best(tmp_path / "1"):  # of samples of 32 tokens
        steps = each["run_seconds"] / each["step_seconds"] / (1 + each["overhead"])
        assert steps == pytest.approx(1e9 / 32 / 32)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            ["work.samples=1e9", "limits.deadline=1s"],
            NoPlanFitsError,
            "the nearest is 8 x a100_8x8, 32 samples with",
        ),
        (
            ["objective=money", "cluster.device.price_per_hour=null"],
            ValueError,
            "'a100_8x8' has no price",
        ),
        (["limits.deadline=soon"], ValueError, r"limits\.deadline: 'soon' is not a quantity"),
        (["batch_size=12"], ValueError, "cannot be divided evenly over 8 devices"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(
    arguments: list[str], error: type[Exception], says: str, tmp_path: Path
) -> None:
    base = ["cluster=a100_8x8", "accumulate=1"]
    base += (
        [] if any(word.startswith("device_counts") for word in arguments) else ["device_counts=[8]"]
    )
    base += [] if any(word.startswith("batch_size") for word in arguments) else ["batch_size=32"]
    with pytest.raises(error, match=says) as raised:
        command(tmp_path, *base, *arguments)
    assert "\n" not in str(raised.value)


def test_the_command_line(tmp_path: Path) -> None:
    """A list of clusters, one of them unknown."""
    words = [*SMALL, "device_counts=[8]", "batch_size=32", "accumulate=1"]
    wrong = topt("plan", *words, "cluster=[a100_8x8,nothing]", folder=tmp_path)
    *_, last = wrong.output.strip().splitlines()
    assert wrong.status == 2 and last.startswith("topt: "), wrong.output
    assert "Could not find 'cluster/nothing'" in last
