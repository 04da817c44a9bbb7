"""Signals end a fit on all ranks after the same batch, with a checkpoint to go on from."""

from __future__ import annotations

import functools
import os
import signal
import stat
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy, LocalStepsStrategy
from tests.launch import free_port
from tests.plugins.test_exact_resume import Model, Numbers
from tests.plugins.trainer_ranks import make_trainer, on_new_ranks
from tests.preloaded import preloaded_topt
from tests.processes import wait_for_end, wait_until

SECONDS = 30  # from a signal to the end, on a busy machine; the promise is two batches and a save


class SignalAt(Callback):
    """This rank gets `number` in some batch of the fit, or in a validation after such a batch."""

    def __init__(self, number, batch, in_validation=False):
        self.number, self.batch, self.in_validation = number, batch, in_validation
        self.sent, self.training_ended = None, False

    def _send(self):
        self.sent = time.monotonic()
        os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if len(module.seen) == self.batch and not self.in_validation:
            self._send()

    def on_validation_start(self, trainer, module):
        if len(module.seen) == self.batch and self.in_validation:
            self._send()

    def on_train_end(self, trainer, module):
        self.training_ended = True


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        pass


def fit(
    folder,
    strategy,
    *,
    number=signal.SIGTERM,
    batch=None,
    in_validation=None,
    resume=None,
    **options,
):
    torch.manual_seed(1)
    os.environ["PL_GLOBAL_SEED"] = "1"
    model, sends = Validated(), SignalAt(number, batch, in_validation)
    trainer = make_trainer(
        strategy,
        devices=dist.get_world_size(),
        callbacks=[sends, ModelCheckpoint(folder / "regular", save_top_k=0, save_last=True)],
        enable_checkpointing=True,
        default_root_dir=folder,
        **{"max_epochs": 2, **options},
    )
    loader, ended = DataLoader(Numbers(), 4, shuffle=True), False
    validation = DataLoader(Numbers(8, draws=False), 4) if in_validation is not None else None
    try:
        trainer.fit(model, loader, validation, ckpt_path=resume, weights_only=True)
    except SIGTERMException:
        ended = True
        if sends.sent is not None:
            assert time.monotonic() - sends.sent < SECONDS
    assert sends.training_ended != ended
    assert trainer.received_sigterm == ended
    return model.seen, model.losses, ended


FITS = {
    "ddp": (lambda: AutoParallelStrategy(plan="ddp"), {}),
    "zero3": (lambda: AutoParallelStrategy(plan="zero3", checkpoint="sharded"), {}),
    "accumulated": (lambda: AutoParallelStrategy(plan="zero3"), {"accumulate_grad_batches": 3}),
    "local steps": (lambda: LocalStepsStrategy({"method": "local_steps", "every": 1}), {}),
}
WHO = {"one": (None, 3), "at different times": (4, 2)}  # in which batch of each rank


def _undisturbed(rank, folder, name):
    make, options = FITS[name]
    return fit(folder, make(), **options)


def _fits(rank, folder, name, who):
    make, options = FITS[name]
    ended = fit(folder, make(), batch=WHO[who][rank], **options)
    return ended, fit(folder, make(), resume="last", **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Each fit as it is without a signal, once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda name: on_new_ranks(_undisturbed, folder / name, name))


@pytest.mark.parametrize(
    ("name", "who"),
    [("zero3", "at different times"), ("accumulated", "one"), ("local steps", "one")],
)
def test_all_ranks_save_after_the_same_batch_and_end(undisturbed, tmp_path, name, who):
    counts = set()
    disturbed = on_new_ranks(_fits, tmp_path, name, who)
    for whole, (ended, rest) in zip(undisturbed(name), disturbed, strict=True):
        assert ended[2] and not whole[2] and not rest[2]
        done = len(ended[0])
        assert done <= max(each or 0 for each in WHO[who]) + 1 + 3
        assert ended[0] == whole[0][:done] and rest[0] == whole[0][done:]
        assert ended[1] == whole[1][:done] and rest[1] == whole[1][done:]
        counts.add(done)
    assert len(counts) == 1
    if "accumulate_grad_batches" in FITS[name][1]:
        assert counts.pop() % 3 == 0


# ---- the end of a fit ----------------------------------------------------------------------------

LAST = {"before the last batch": (1, False), "last batch": (0, False), "validation": (-1, True)}


def _fits_to_their_end(rank, folder, name):
    make, options = FITS[name]
    whole = fit(folder / "undisturbed", make(), in_validation=False, **options)
    epoch = len(whole[0]) // 2
    found = {}
    # several ranks end before the last batch as in the middle of an epoch, which is tested above
    for where, (left, in_validation) in [*LAST.items()][dist.get_world_size() - 1 :]:
        # of one rank, which is another one each time
        sends = epoch - 1 - left if dist.get_world_size() == 1 or rank == left % 2 else None
        ended = fit(
            folder / where,
            make(),
            batch=sends,
            in_validation=in_validation,
            **{**options, "max_epochs": 1},
        )
        rest = fit(folder / where, make(), in_validation=False, resume="last", **options)
        found[where] = ended, rest
    return whole, found


@pytest.mark.parametrize(("name", "world_size"), [("accumulated", 2), ("ddp", 1)])
def test_a_signal_at_the_end_of_a_fit_ends_it_too(tmp_path, name, world_size):
    ranks = on_new_ranks(_fits_to_their_end, tmp_path, name, world_size=world_size)
    for whole, found in ranks:
        done = len(whole[0]) // 2
        for where, (ended, rest) in found.items():
            assert ended[2] and not rest[2], where
            # one rank ends before the next batch
            last = done - 1 if (where, world_size) == ("before the last batch", 1) else done
            if "accumulate_grad_batches" in FITS[name][1]:
                last = done
            assert len(ended[0]) == last, where
            assert ended[0] + rest[0] == whole[0], where
            assert ended[1] + rest[1] == whole[1], where


# ---- under SLURM ---------------------------------------------------------------------------------


class Slow(TorchCheckpointIO):
    def save_checkpoint(self, *args, **kwargs):
        time.sleep(0.5)
        super().save_checkpoint(*args, **kwargs)


def _fit_of_a_slurm_job(rank, folder, form):
    log, program = folder / "requeued", folder / "scontrol"
    saved = folder / "hpc_ckpt_1.ckpt"
    program.write_text(f'#!/bin/sh\ntest -e {saved} && echo "$@" >> {log}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    )
    strategy = AutoParallelStrategy(plan="zero3", checkpoint=form)
    batch = 2 if rank == 1 else None
    plugins = [SLURMEnvironment(requeue_signal=signal.SIGUSR1)]
    plugins += [AsyncCheckpointIO(Slow())] if form == "full" else []
    seen, _, ended = fit(folder, strategy, number=signal.SIGUSR1, batch=batch, plugins=plugins)
    return len(seen), ended


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_the_signal_of_slurm_queues_the_job_again_once(tmp_path, form):
    """After the save, also where a plugin writes beside training."""
    first, second = on_new_ranks(_fit_of_a_slurm_job, tmp_path, form)
    assert first == second and first[1]
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir() == (form == "sharded")
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


# ---- different checkpoints -----------------------------------------------------------------------


def _resume_on_one_rank(rank, folder):
    strategy = AutoParallelStrategy(plan="ddp")
    fit(folder, strategy, max_epochs=1)
    trainer = make_trainer(AutoParallelStrategy(plan="ddp"), devices=2, max_epochs=1)
    trainer.fit(Model(), DataLoader(Numbers(), 4))
    trainer.save_checkpoint(folder / "saved.ckpt")
    with pytest.raises(RuntimeError) as caught:
        fit(
            folder, AutoParallelStrategy(plan="ddp"), resume=None if rank else folder / "saved.ckpt"
        )
    return str(caught.value)


def test_ranks_that_find_different_checkpoints_say_so(tmp_path):
    for message in on_new_ranks(_resume_on_one_rank, tmp_path):
        assert f"rank 0 found {tmp_path}/saved.ckpt (epoch 1, step 6)" in message
        assert "rank 1 no checkpoint" in message


# ---- Ctrl-C --------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_topt import AutoParallelStrategy
from tests.plugins.test_exact_resume import Model, Numbers
from torch.utils.data import DataLoader

folder = Path(sys.argv[1])


class Says(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if len(module.seen) == 3:
            Path(folder, f"rank{trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.05)


trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=AutoParallelStrategy(plan="zero3"), max_epochs=1000,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Says(), ModelCheckpoint(folder / "regular", save_top_k=0, save_last=True)],
)
trainer.fit(Model(), DataLoader(Numbers(), 4, num_workers=1))
"""


@pytest.mark.parametrize(("number", "saves"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_to_the_main_process_ends_all_ranks(tmp_path, number, saves):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "PYTHONPATH": os.getcwd()}
    main = subprocess.Popen([preloaded_topt(), str(program), str(tmp_path)], env=environment)
    ranks = [tmp_path / f"rank{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(rank.exists() and rank.read_text() for rank in ranks), seconds=120)
        main.send_signal(number)
        assert main.wait(timeout=SECONDS) == (0 if saves else 1)
        for rank in ranks:
            assert wait_for_end(int(rank.read_text()))
    finally:
        main.kill()
        main.wait()
    assert (tmp_path / "regular" / "last-signal.ckpt").exists() == saves
