"""Files of Lightning's FSDP and ModelParallel, DeepSpeed's and ddp's, into any plan and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies import fsdp as lightning_fsdp
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset

from lightning_topt.execution.sharded_checkpoint import is_folder
from tests.models import GPTBlock
from tests.plugins.trainer_ranks import (
    OwnShare,
    RecordingGPT,
    Tokens,
    loader,
    make_trainer,
    on_ranks,
    topt_trainer,
)

PLANS = ("ddp", "zero3")


class CPUFSDP(FSDPStrategy):
    """Lightning and torch ask for GPUs; where they are told of the CPU, torch shards there too."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def full_states(module: Any, world_size: int, rank0_only: bool = True) -> Any:
    """Lightning's, without the copy from the CPU to the CPU: under torch 2.13 that ends with a
    segmentation fault, or with states of freed memory.
    """
    options = {"offload_to_cpu": False, "rank0_only": rank0_only}
    return FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(**options),
        FullOptimStateDictConfig(**options),
    )


def fsdp(form: str) -> CPUFSDP:
    return CPUFSDP(state_dict_type=form, auto_wrap_policy={GPTBlock})


class Trained(RecordingGPT):
    def train_dataloader(self) -> Any:
        return OwnShare(8, length=16)

    def configure_optimizers(self) -> Any:
        # by their names: shards of FSDP have one dimension, whatever the parameter has
        named = [*self.named_parameters()]
        groups = [
            {"params": [p for name, p in named if name.endswith("bias") == is_bias], **options}
            for is_bias, options in ((False, {"weight_decay": 0.1}), (True, {}))
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class FSDP2(Trained):
    """As users of ModelParallelStrategy write it: shards of each block, and of the rest."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Same(Trained):
    """Every rank gets the same batches."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        tokens = Tokens(16)
        return (tokens[index] for index in range(len(tokens)))


class Slices(Same):
    """Slices of the products, as users of ModelParallelStrategy write it."""

    def configure_model(self) -> None:
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


MODULES = {"fsdp2": FSDP2, "slices": Slices}


def trainer_of(name: str, **kwargs: Any) -> Any:
    devices = dist.get_world_size()
    if name in MODULES:
        sizes = (devices, 1) if name == "fsdp2" else (1, devices)
        strategy = ModelParallelStrategy(*sizes, save_distributed_checkpoint=False)
        return make_trainer(strategy, devices=devices, **kwargs)
    if name.startswith("fsdp"):
        return make_trainer(fsdp(name.removeprefix("fsdp ")), devices=devices, **kwargs)
    if name == "lightning":
        return make_trainer(DDPStrategy(), devices=devices, **kwargs)
    return topt_trainer(name, **kwargs)


def fit(
    name: str, *, epochs: int, path: Any = None, kind: type[Trained] = Trained
) -> tuple[Any, Any]:
    torch.manual_seed(0 if path is None else 1)
    trainer, module = trainer_of(name, max_epochs=epochs), MODULES.get(name, kind)()
    trainer.fit(module, ckpt_path=path)
    return trainer, module


def there_and_back(rank: int, folder: Path) -> Any:
    undisturbed = fit("lightning", epochs=2)[1].losses
    resumed = {}
    for form in ("full", "sharded"):
        path = folder / f"{form}.ckpt"
        trainer, _ = fit(f"fsdp {form}", epochs=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lightning_fsdp, "_get_full_state_dict_context", full_states)
            trainer.save_checkpoint(path)
        if form == "sharded":  # Lightning's command turns the folder into a file
            with pytest.raises(ValueError, match="consolidate_checkpoint"):
                is_folder(path)
            path = folder / f"file of rank {rank}.ckpt"
            torch.save(
                _format_checkpoint(_load_distributed_checkpoint(folder / f"{form}.ckpt")), path
            )
        for plan in PLANS if form == "full" else PLANS[-1:]:
            trainer, module = fit(plan, epochs=2, path=path)
            resumed[form, plan] = module.losses
        # back to plain, from a plan that was resumed
        trainer.save_checkpoint(folder / f"{form}, ours.ckpt")
        tested = trainer.test(module, loader(4), verbose=False)[0]["test_loss"]
        plain = trainer_of("lightning").test(
            Trained(), loader(4), ckpt_path=folder / f"{form}, ours.ckpt", verbose=False
        )
        resumed[form, "tested"] = tested, plain[0]["test_loss"]
    return undisturbed, resumed


def from_model_parallel(rank: int, folder: Path, name: str) -> Any:
    """Losses of an undisturbed fit, and of those that other plans have gone on with."""
    path = folder / "last.ckpt"
    undisturbed = fit(name, epochs=2)[1].losses
    fit(name, epochs=1)[0].save_checkpoint(path)
    kind = Same if name == "slices" else Trained
    resumed = {plan: fit(plan, epochs=2, path=path, kind=kind)[1].losses for plan in PLANS}
    return undisturbed, resumed


@pytest.mark.parametrize("name", MODULES)
def test_files_of_model_parallel_go_on_under_any_plan(tmp_path: Path, name: str) -> None:
    for undisturbed, resumed in on_ranks(from_model_parallel, tmp_path, name):
        half = len(undisturbed) // 2
        for plan, losses in resumed.items():
            assert half and losses == pytest.approx(undisturbed[half:], rel=1e-5), plan


def test_checkpoints_of_fsdp_go_on_under_any_plan(tmp_path: Path) -> None:
    for undisturbed, resumed in on_ranks(there_and_back, tmp_path):
        for (form, what), found in resumed.items():
            if what == "tested":
                assert found[0] == pytest.approx(found[1], rel=1e-5), form
            else:
                assert found == pytest.approx(undisturbed[2:], rel=1e-5), (form, what)


def test_weights_of_deepspeed_are_loaded_from_one_file(tmp_path: Path) -> None:
    # as convert_zero_checkpoint_to_fp32_state_dict of Lightning writes it: no optimizer states
    module = Trained()
    weights = {name: value.float() for name, value in module.state_dict().items()}
    content = {
        "state_dict": weights,
        "pytorch-lightning_version": "2.6.6",
        "epoch": 1,
        "global_step": 4,
    }
    torch.save(content, tmp_path / "weights.ckpt")
    for losses in on_ranks(alike_when_tested, str(tmp_path / "weights.ckpt")):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    folder = tmp_path / "zero.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match="DeepSpeed"):
        is_folder(folder)


def alike_when_tested(rank: int, path: str) -> list[float]:
    return [
        trainer_of(name).test(Trained(), loader(4), ckpt_path=path, verbose=False)[0]["test_loss"]
        for name in ("lightning", "zero3")
    ]
