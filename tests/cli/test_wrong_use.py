"""Wrong use of `topt` is one sentence and exit status 2, whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_plugins.lightning_topt_searchpath import conf_dir
from tests.cli.test_main import TINY
from tests.forked_command import forked_topt

SMALL = " ".join(TINY)
ALONE = f"{SMALL} tensor=false pipeline=false cluster=local_cpu"
OF_8 = "cluster.devices_per_node=8"
LACKING = "data=own data._target_=lacking.Data"
WHOLE = "is at least 1, a whole number; got"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("plan trainer.num_nodes=-1", "trainer: `num_nodes` must be a positive integer"),
        ("plan data.batch_size=-1", f"data: batch_size {WHOLE} -1"),
        ("plan seed=abc", "'abc'"),
        ("plan trainer.accumulate_grad_batches=0", "accumulate_grad_batches is at least 1"),
        ("plan hydra.run.dir=/dev/null/run", "(hydra.run.dir): [Errno 20] Not a directory"),
        ("plan cluster=mine", "Could not find 'cluster/mine'"),
        ("calibrate devices=nope", f"devices {WHOLE} 'nope'"),
        ("plan --config-dir twice model=twice", "found duplicate key hidden"),
        ("plan --config-dir twice model=broken", "Input/output error"),
        ("plan strategy.cluster=twice.yaml", "the key 'num_nodes' stands twice, again in line"),
        ("plan strategy.memory_limt=2GiB", "does not take 'memory_limt'"),
        ("plan strategy.plan=zero1", "such as 'mesh={data:2,tensor:4}'"),
        ("train +trainer.colour=red", "colour"),
        (f"plan {ALONE} strategy.memory_limit=1KiB", "memory"),
        (f"plan {ALONE} device_counts=[2,3] {OF_8}", "cannot be divided evenly over 3 devices"),
        (f"plan {ALONE} trainer.num_nodes=2 {OF_8}", "say cluster.devices_per_node=2"),
        (f"plan {SMALL} mesh={{data:2,tensor:2}}", "4 ranks do not fit the 2 device(s) here"),
        (f"plan {SMALL} device_counts=[8] batch_size=8", "8 ranks do not fit the 2 device(s) here"),
        (f"plan {SMALL} mesh={{pipeline:4}} cluster=local_cpu", "4 ranks do not fit the cluster"),
        (f"plan {LACKING}", "No module named 'not_there'; install the package that has it"),
        (f"train {LACKING} trainer.devices=1 strategy=ddp", "No module named 'not_there'; install"),
        (f"plan {SMALL} model.num_heads=1 cluster=a100_8x8 mesh={{tensor:7}}", "cut into 7 slices"),
    ],
)
def test_one_sentence_and_status_2(words: str, sentence: str, tmp_path: Path) -> None:
    # a model and a cluster with a key that stands twice
    (tmp_path / "twice" / "model").mkdir(parents=True)
    for name, key, to in (
        ("model/gpt", "hidden: 256", "twice/model/twice"),
        ("cluster/local_cpu", "num_nodes: 1", "twice"),
    ):
        text = (conf_dir() / f"{name}.yaml").read_text()
        line = next(line for line in text.splitlines() if line.strip() == key)
        (tmp_path / f"{to}.yaml").write_text(text.replace(line, f"{line}\n{line}"))
    # and one whose reading fails
    (tmp_path / "twice" / "model" / "broken.yaml").symlink_to("/proc/self/mem")
    # and data that need a package
    (tmp_path / "lacking.py").write_text(
        "import lightning as L\n\n\nclass Data(L.LightningDataModule):\n"
        "    def setup(self, stage):\n        import not_there\n"
    )
    status, output = forked_topt(*words.split(), folder=tmp_path)
    said = [line for line in output.splitlines() if line.startswith("topt: ")]
    assert len(said) == 1 and sentence in said[0], output
    assert status == 2 and "Traceback" not in output
