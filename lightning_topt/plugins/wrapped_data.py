"""A LightningDataModule around another one, which changes its loaders and nothing else."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader
from typing_extensions import override

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_HOOKS = ("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict")


class WrappedDataModule(pl.LightningDataModule):
    """Another DataModule as it is, but for its loaders.

    Attributes, hyper-parameters and state are those of `datamodule`; a subclass overrides what
    gives loaders, or names those that are `_changed`. What is set on it goes to `datamodule` where
    that has the attribute, as tuners do with ``batch_size``. What belongs to a subclass itself is
    set before it calls this constructor.
    """

    _changes: tuple[str, ...] = ()

    def __init__(self, datamodule: pl.LightningDataModule) -> None:
        super().__init__()
        if not isinstance(datamodule, pl.LightningDataModule):
            raise TypeError(
                f"{type(self).__name__} wraps a LightningDataModule of `lightning`, not a "
                f"{type(datamodule).__module__}.{type(datamodule).__qualname__}: give it an "
                "instance of a subclass of lightning.pytorch.LightningDataModule"
            )
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        # What the wrapped module logs and saves is logged and saved.
        if datamodule._log_hyperparams:
            self.save_hyperparameters(dict(datamodule.hparams_initial))
            self._hparams = datamodule.hparams  # one object: the Trainer's tuners change it
        for name in (*LOADERS, *TRANSFERS):  # Lightning asks whether a module has its own
            if not is_overridden(name, datamodule, pl.LightningDataModule):
                setattr(self, name, types.MethodType(getattr(pl.LightningDataModule, name), self))
        self.datamodule = datamodule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "datamodule" not in vars(self):
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Until `datamodule` is there, and for attributes of the subclass, nothing is passed on.
        is_here = "datamodule" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        if is_here or not hasattr(self.datamodule, name):
            super().__setattr__(name, value)
        else:
            setattr(self.datamodule, name, value)

    @property
    def trainer(self) -> pl.Trainer | None:
        """The Trainer, also of the wrapped module."""
        return vars(self).get("_trainer")

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        vars(self)["_trainer"] = trainer
        if "datamodule" in vars(self):
            self.datamodule.trainer = trainer

    def _changed(self, loaders: Any, *, path: str = "") -> Any:
        # `loaders` with `_changed_loader` applied to each: one DataLoader, or a collection of them
        if isinstance(loaders, DataLoader):
            return self._changed_loader(loaders, path)
        if isinstance(loaders, CombinedLoader):
            return CombinedLoader(self._changed(loaders.iterables, path=path), loaders._mode)
        if isinstance(loaders, Mapping):
            items = {
                name: self._changed(loader, path=f"{path}/{name}")
                for name, loader in loaders.items()
            }
            return type(loaders)(items)  # type: ignore[call-arg]
        if isinstance(loaders, list | tuple):
            return type(loaders)(
                self._changed(loader, path=f"{path}/{i}") for i, loader in enumerate(loaders)
            )
        raise ValueError(
            f"{type(self.datamodule).__name__} gives a {type(loaders).__name__} as loader; "
            f"{type(self).__name__} wraps torch.utils.data.DataLoader"
        )

    def _changed_loader(self, loader: DataLoader[Any], path: str) -> Any:
        # What takes the place of one loader; `path` says which one it is in a collection
        raise NotImplementedError


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: WrappedDataModule, *args: Any, **kwargs: Any) -> Any:
        given = getattr(self.datamodule, name)(*args, **kwargs)
        return self._changed(given) if name in self._changes else given

    return call


for _name in (*_HOOKS, *LOADERS, *TRANSFERS):
    setattr(WrappedDataModule, _name, _delegated(_name))
