"""Random inputs for a model of Hugging Face's transformers: to plan, and to time steps, without
data.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_topt.cli.tasks.hugging_face import Config, model_class, read_config


class RandomSamples(Dataset[dict[str, Tensor]]):
    """`num_samples` samples of a model's inputs, the same at every call.

    Raises ValueError for a model that takes neither tokens nor pictures.
    """

    def __init__(self, config: Any, *, seq_len: int, num_samples: int) -> None:
        self.seq_len, self.num_samples, self.config = seq_len, num_samples, config
        trains = model_class(config)
        self.takes = getattr(trains, "main_input_name", "input_ids")
        if self.takes not in ("input_ids", "pixel_values"):
            raise ValueError(
                f"random inputs are made of tokens or pictures, and {trains.__name__} takes "
                f"{self.takes}: give data of your own (data=own)"
            )
        words = trains.__name__
        self.classifies = "Classification" in words and "Token" not in words

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        source = torch.Generator().manual_seed(index)
        found = {
            self.takes: self._tokens(source) if self.takes == "input_ids" else self._picture(source)
        }
        classes = torch.randint(0, self.config.num_labels, (), generator=source)
        found["labels"] = classes if self.classifies else self._tokens(source)
        return found

    def _tokens(self, source: torch.Generator) -> Tensor:  # (seq_len,)
        return torch.randint(
            0, self.config.get_text_config().vocab_size, (self.seq_len,), generator=source
        )

    def _picture(self, source: torch.Generator) -> Tensor:  # (channels, height, width)
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return torch.randn(getattr(self.config, "num_channels", 3), height, width, generator=source)


class RandomInputs(pl.LightningDataModule):
    """Random tokens or pictures for a model of transformers, with random labels.

    Args:
        config: that of the model.
        seq_len: tokens of a sample.
        batch_size: samples per rank.
        num_samples: of an epoch.
    """

    def __init__(
        self, config: Config, seq_len: int = 1024, batch_size: int = 1, *, num_samples: int = 65536
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.samples = RandomSamples(read_config(config), seq_len=seq_len, num_samples=num_samples)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the training batches."""
        return DataLoader(self.samples, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the same batches for validation."""
        return self.train_dataloader()
