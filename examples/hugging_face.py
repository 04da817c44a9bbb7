"""Any architecture of Hugging Face's transformers, and random inputs to plan it and to time steps.

    topt plan --config-dir examples/conf model=llama3_8b cluster=a100_8x8

    model = HuggingFaceModel("config.json", seq_len=4096)       # random weights
    data = RandomInputs("config.json", seq_len=4096)

A model is made of its configuration alone: nothing is downloaded. Planned models are built on the
meta device, so a model of any size takes no memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.basics.units import format_bytes

Config = str | Mapping[str, Any]
_UNMASKED = "sdpa_without_mask"


class HuggingFaceModel(pl.LightningModule):
    """A model of transformers that computes its own loss, trained with AdamW.

    Logs `train_loss` and `val_loss`. Samples have no padding: attention gets no mask.

    Args:
        config: a ``config.json``, or its entries; ``architectures`` names the class, such as
            ``[LlamaForCausalLM]``.
        seq_len: tokens of a sample; positions are made for as many.
        learning_rate: of AdamW.
        weight_decay: of AdamW; vectors do not decay.

    Raises:
        ValueError: as in `read_config` and `model_class`, and for a model that is larger than the
            memory of this machine.
    """

    def __init__(
        self,
        config: Config,
        seq_len: int | None = None,
        *,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        if seq_len is not None:
            check_whole(seq_len, name="seq_len")
        # the configuration, its class, then the model; the last alone takes memory
        made = read_config(config, seq_len=seq_len)
        trains = model_class(made)
        _check_memory(trains, made)
        if seq_len is None or not _has_window(made, seq_len):
            _take_no_mask(trains, made)
        self.model = trains(made)
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                # a cache would find the layer by it; with equal ones, layers are alike, and the
                # capture reads them once for all
                module.layer_idx = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = getattr(self.model(**batch), "loss", None)
        if loss is None:
            raise ValueError(
                f"{type(self.model).__name__} computes no loss: name a class for training in the "
                "configuration's entry architectures, such as LlamaForCausalLM"
            )
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW without decay of vectors."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.learning_rate, betas=(0.9, 0.95), fused=True
        )


class RandomInputs(pl.LightningDataModule):
    """Random tokens or pictures for a model of transformers, with random labels.

    Args:
        config: that of the model, as `HuggingFaceModel` takes it.
        seq_len: tokens of a sample.
        batch_size: samples per rank.
        num_samples: of an epoch.
    """

    def __init__(
        self, config: Config, seq_len: int = 1024, batch_size: int = 1, *, num_samples: int = 65536
    ) -> None:
        super().__init__()
        self.batch_size = check_whole(batch_size, name="batch_size")
        check_whole(seq_len, name="seq_len")
        self.samples = RandomSamples(read_config(config), seq_len=seq_len, num_samples=num_samples)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the training batches."""
        return DataLoader(self.samples, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the same batches for validation."""
        return self.train_dataloader()


class RandomSamples(Dataset[dict[str, Tensor]]):
    """`num_samples` samples of a model's inputs, the same at every call.

    Raises:
        ValueError: for a model that takes neither tokens nor pictures.
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
        # one label for a sample, or one for each token
        self.classifies = "Classification" in words and "Token" not in words

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        # every sample has a seed of its own
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


# ---- the configuration and the class of a model


def read_config(config: Config, *, seq_len: int | None = None) -> Any:
    """Return the transformers configuration that a ``config.json`` or its entries stand for.

    With `seq_len` it allows for positions of so many tokens.

    Raises:
        ValueError: a file that cannot be read, or a configuration without a known ``model_type``.
    """
    entries = _entries(config)
    kind = entries.pop("model_type", None)
    known = transformers().AutoConfig
    try:
        found = known.for_model(kind, **entries)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"model.config: model_type={kind!r} is no architecture of the installed transformers, "
            "such as 'llama' or 'gpt2'"
        ) from error
    # a model of -1 layers would be built, with none
    if (layers := getattr(found, "num_hidden_layers", None)) is not None:
        check_whole(layers, name="model.config.num_hidden_layers")
    found.architectures = entries.get("architectures")
    found.use_cache = False  # of generation
    # architectures name the most positions in two ways
    for name in ("max_position_embeddings", "n_positions"):
        if (
            seq_len is not None
            and isinstance(most := getattr(found, name, None), int)
            and most < seq_len
        ):
            setattr(found, name, seq_len)
    return found


def _entries(config: Config) -> dict[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"model.config: cannot read {config!r}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"model.config: {config!r} is not JSON") from error
    if not isinstance(config, Mapping):
        raise ValueError("model.config is a config.json of Hugging Face, or its entries")
    entries: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    return {str(key): value for key, value in dict(entries).items()}


def model_class(config: Any) -> Any:
    """Return the class that trains the model of a configuration.

    It is the one that the entry ``architectures`` names, else one that fits the kind of model.

    Raises:
        ValueError: transformers has no such class.
    """
    hf = transformers()
    if config.architectures:
        name = config.architectures[0]
        if not hasattr(hf, name):
            raise ValueError(
                f"model.config: the installed transformers has no class {name!r} (the entry "
                "architectures)"
            )
        return getattr(hf, name)
    autos = [
        "AutoModelForSeq2SeqLM",
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoModelForImageClassification",
    ]
    for auto in autos:
        mapping = getattr(hf, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"model.config: {config.model_type!r} is neither a language model nor a classifier of "
        "pictures; name the class in its entry architectures, or write a LightningModule "
        "(model=own)"
    )


def transformers() -> Any:
    """Return Hugging Face's package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ValueError(
            'model=hf builds models of the package transformers: pip install -e ".[hf]"'
        ) from error


# ---- what a model needs of this machine, and of its attention


def _check_memory(trains: Any, config: object) -> None:
    """Refuse a model that is larger than this machine's memory, unless it is made on meta."""
    if torch.get_default_device().type == "meta":
        return
    try:
        with torch.device("meta"):
            size = sum(parameter.nbytes for parameter in trains(config).parameters())
    except Exception:  # a constructor that reads values; it is tried as it is
        return
    if size > (free := psutil.virtual_memory().available):
        raise ValueError(
            f"{trains.__name__} has {format_bytes(size)} of parameters, and this machine "
            f"{format_bytes(free)} of free memory: it can be planned here, not trained"
        )


def _has_window(config: Any, seq_len: int) -> bool:
    """Return whether attention has a window shorter than a sample, for which it needs a mask."""
    window = getattr(config.get_text_config(), "sliding_window", None)
    return isinstance(window, int) and window < seq_len


def _take_no_mask(trains: object, config: Any) -> None:
    """Let attention be causal by its argument, as training without padding does on real tensors.

    On fake tensors transformers would build a mask of all pairs of tokens, since it cannot see that
    it needs none. An attention function that is registered without a mask function gets none.
    """
    if getattr(trains, "_supports_sdpa", False):
        functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        functions.register(_UNMASKED, functions["sdpa"])
        config._attn_implementation = _UNMASKED
