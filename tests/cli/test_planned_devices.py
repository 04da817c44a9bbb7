"""How many devices `topt plan` plans for: all of a named cluster, unless a number is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.forked_command import forked_topt

TINY = (
    *("model.num_layers=1", "model.hidden=32", "model.num_heads=2", "model.seq_len=32"),
    *("data.max_bytes=40000", "tensor=false", "pipeline=false", "hydra.run.dir=run"),
)


@pytest.mark.parametrize(
    ("words", "said", "ranks"),
    [
        (["cluster=h100_2x8"], "Planning for all 16 devices of h100_2x8, in 32-true.", 16),
        (
            ["cluster=h100_2x8", "trainer.devices=4"],
            "Planning for 4 of the 16 devices of h100_2x8, in 32-true.",
            4,
        ),
        (
            ["cluster=h100_2x8", "device_counts=[4]"],
            "Planning for 4 of the 16 devices of h100_2x8, in 32-true.",
            4,
        ),
        (
            ["--config-dir", "mine", "cluster=h100_2x8", "experiment=four"],
            "Planning for 4 of the 16 devices of h100_2x8, in 32-true.",
            4,
        ),
        (["cluster=local_cpu"], "Planning for all 2 devices of local_cpu, in 32-true.", 2),
    ],
    ids=["all", "given", "counted", "in a file", "local"],
)
def test_devices(words: list[str], said: str, ranks: int, tmp_path: Path) -> None:
    """The batch of each rank is that of the loader, whoever says how many ranks there are."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "four.yaml").write_text(
        "# @package _global_\ntrainer:\n  devices: 4\n"
    )
    is_short = len(words) == 1 or "trainer.devices=4" in words
    status, output = forked_topt("plan", *words, *TINY, folder=tmp_path, reads_only=is_short)
    assert status == 0 and said in output.splitlines(), output
    if is_short:
        return
    plan = ParallelPlan.load(tmp_path / "run" / "plan.yaml")
    assert plan.mesh.size == ranks and plan.batch_size == 8
