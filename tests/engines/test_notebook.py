"""Fits in a notebook: cells that a real Jupyter kernel runs, with ranks forked from it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until

nbclient = pytest.importorskip("nbclient", reason="no nbclient")
nbformat = pytest.importorskip("nbformat", reason="no nbformat")
pytest.importorskip("ipykernel", reason="no ipykernel")

ROOT = Path(__file__).parents[2]
# by their names, and with a class
STRATEGIES = {
    "topt": "'topt_notebook'",
    "topt_compressed": "lightning_topt.CompressedDDPStrategy(Dense(), start_method='fork')",
}
DEFINED = """
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_topt
from lightning_topt.communication import Dense

class Net(L.LightningModule):
    def __init__(self, fails_at=None, pause=0.0):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        self.fails_at, self.pause = fails_at, pause

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise LookupError(f"no such word in batch {batch_idx}")
        if self.pause:
            Path(f"begun-{self.global_rank}").touch()
            time.sleep(self.pause)
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

data = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(-1, 8)
loader = DataLoader(data, 4)

def fit(strategy, net, epochs=2):
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(net, loader)
    return trainer

def weights(net):
    return [weight.detach().clone() for weight in net.parameters()]
"""
# the same as Lightning's, of which the notebook's own module gets the weights
AS_DDP = """
found = {}
for strategy in ("ddp_notebook", STRATEGY):
    torch.manual_seed(0)
    net = Net()
    before = weights(net)
    trainer = fit(strategy, net)
    found[strategy] = weights(net)
assert not any(map(torch.equal, before, found[strategy]))
for expected, weight in zip(*found.values(), strict=True):
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
print("TRAINED", "loss" in trainer.callback_metrics)
"""
AGAIN = """
before = weights(net)
trainer = fit(STRATEGY, net, 1)
assert not any(map(torch.equal, before, weights(net)))
print("AGAIN")
"""
# what ranks have decided is known in the notebook, and what comes next does not mind
SHARDED = """
strategy = lightning_topt.AutoParallelStrategy(plan="zero3", start_method="fork")
trainer = fit(strategy, net, 1)
print("PLAN", strategy.planned_by, strategy.parallel_plan.summary())
(result,) = trainer.validate(net, loader, verbose=False)
print("VALIDATED", abs(result["val_loss"] - float(net.net(data).square().mean())) < 1e-5)
"""


def processes_of(group: int) -> set[int]:
    """Return the processes of a process group that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == group and state not in "ZX":
            found.add(int(stat.parent.name))
    return found


class Notebook:
    """A notebook whose cells run one after the other, in a kernel of process `pid`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.run(DEFINED)
        self.pid = int(self.run("import os; print(os.getpid())"))

    def run(self, source: str) -> str:
        """Run a cell and return what it printed. Raises CellExecutionError as it ends with one."""
        cell, cells = nbformat.v4.new_code_cell(source), self._client.nb.cells
        cells.append(cell)
        self._client.execute_cell(cell, len(cells) - 1)
        return "".join(output.get("text", "") for output in cell.outputs)

    def fails(self, source: str) -> str:
        """Run a cell that is to end with an error, and return what it shows of it."""
        with pytest.raises(nbclient.exceptions.CellExecutionError) as error:
            self.run(source)
        return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(folder: Path) -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))
        patch.setenv("OMP_NUM_THREADS", "1")
        client = nbclient.NotebookClient(
            nbformat.v4.new_notebook(), timeout=120, resources={"metadata": {"path": str(folder)}}
        )
        with client.setup_kernel():
            yield Notebook(client)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fits_are_those_of_ddp_notebook(notebook: Notebook, name: str) -> None:
    make = f"STRATEGY = {STRATEGIES[name]}\n"
    assert "TRAINED True" in notebook.run(make + AS_DDP)
    assert "AGAIN" in notebook.run(make + AGAIN)


def test_the_notebook_knows_the_plan_and_validates(notebook: Notebook) -> None:
    printed = notebook.run("net = Net()" + SHARDED)
    assert "PLAN given 3 x ZeRO-3" in printed and "VALIDATED True" in printed, printed


def test_an_error_of_the_model_is_shown(notebook: Notebook) -> None:
    shown = notebook.fails("fit('topt_notebook', Net(fails_at=3))")
    assert "LookupError: no such word in batch 3" in shown and "in training_step" in shown
    wait_until(lambda: processes_of(os.getpgid(notebook.pid)) == {notebook.pid})


@pytest.mark.parametrize("reaches", ["all", "kernel"])
def test_an_interrupted_cell_leaves_no_process(
    notebook: Notebook, folder: Path, reaches: str
) -> None:
    """Jupyter interrupts the kernel's process group, other programs the kernel alone."""
    begun = [folder / f"begun-{rank}" for rank in range(2)]
    for path in begun:
        path.unlink(missing_ok=True)
    ranks: set[int] = set()

    def interrupt() -> None:
        wait_until(lambda: all(path.exists() for path in begun), seconds=60)
        ranks.update(processes_of(os.getpgid(notebook.pid)) - {notebook.pid})
        if reaches == "all":
            os.killpg(os.getpgid(notebook.pid), signal.SIGINT)
        else:
            os.kill(notebook.pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        shown = notebook.fails("fit('topt_notebook', Net(pause=0.05), 10_000)")
    finally:
        thread.join()
    assert "Detected KeyboardInterrupt" in shown and len(ranks) >= 2
    wait_until(lambda: processes_of(os.getpgid(notebook.pid)) == {notebook.pid}, seconds=10)
    # and the next fit is as any
    assert "AGAIN" in notebook.run("STRATEGY, net = 'topt_notebook', Net()" + AGAIN)
