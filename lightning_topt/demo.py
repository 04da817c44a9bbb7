"""The model and data of the demo: a byte-level GPT, and the Python standard library's own source.

Shapes: batch B, sequence S, hidden H, heads N. A batch is bytes (B, S+1): positions 0..S-1 go in,
positions 1..S are predicted.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_topt.basics.argument_checks import check_whole

VOCABULARY = 256
VALIDATION = 0.1  # share of the files
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class TransformerBlock(nn.Module):
    """One pre-norm Transformer block: causal attention, then a perceptron of width 4H."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H) -> (B, S, H)
        """Apply attention and perceptron, each added to its input."""
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x))))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (B, S, 3, N, H/N)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # 3 x (B, N, S, H/N)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)  # (B, S, H)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class ByteGPT(pl.LightningModule):
    """GPT over bytes. Logs `train_loss` (nats per byte) and `val_bits_per_byte`.

    Args:
        num_layers: Transformer blocks.
        hidden: width H.
        num_heads: N.
        seq_len: S.
        dropout: after attention and perceptron, and of attention weights.
        tied_head: use the embedding's weights for the output layer.
        learning_rate: of AdamW, at its highest.
        weight_decay: of matrices alone.
        warmup_steps: steps in which the learning rate rises linearly.
        decay_steps: step at which a cosine decay ends, at a tenth of `learning_rate`; None keeps
            the rate.
        fused: let one kernel update all parameters; False: AdamW as torch makes it.

    Raises:
        ValueError: a size that is none, or `hidden` is not divisible by `num_heads`.
    """

    def __init__(
        self,
        num_layers: int = 4,
        hidden: int = 256,
        num_heads: int = 8,
        seq_len: int = 128,
        *,
        dropout: float = 0.0,
        tied_head: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        decay_steps: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads}
        for name, size in {**sizes, "seq_len": seq_len}.items():
            check_whole(size, name=name)
        if hidden % num_heads:
            raise ValueError(f"hidden ({hidden}) must be divisible by num_heads ({num_heads})")
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList(
            TransformerBlock(hidden, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.val_bits_per_byte = MeanMetric()
        # GPT-2's rule (Radford et al. 2019, section 2.3): layers that end a residual branch start
        # smaller
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("attention_out.weight", "mlp_out.weight"))
                std = 0.02 / math.sqrt(2 * num_layers) if ends_branch else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        # after the initialisation, so that a tied head has the embedding's values
        if tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, VOCABULARY)
        """Return the logits of the next byte at every position."""
        x = self.embedding(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _loss(self, batch: Tensor) -> Tensor:  # (B, S+1) -> ()
        tokens = batch.long()
        # every position predicts the byte after it
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss in nats per byte."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add the batch to the mean number of bits per byte."""
        self.val_bits_per_byte.update(self._loss(batch) / math.log(2), weight=batch[:, 1:].numel())
        self.log("val_bits_per_byte", self.val_bits_per_byte, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW without decay of biases and norms, and its learning rate schedule."""
        # weight decay for matrices alone: biases and norms are vectors
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        decayed = {"params": matrices, "weight_decay": self.hparams["weight_decay"]}
        groups = [decayed, {"params": vectors, "weight_decay": 0.0}]
        rate, fused = self.hparams["learning_rate"], self.hparams["fused"]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        # The share of the learning rate: linear warm-up, then cosine decay, if any
        warmup: int = self.hparams["warmup_steps"]
        decay: int | None = self.hparams["decay_steps"]
        rise = min(1.0, (step + 1) / max(1, warmup))
        if decay is None or step < warmup:
            return rise
        done = min(1.0, (step - warmup) / max(1, decay - warmup))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


class ByteSequences(Dataset[Tensor]):
    """Windows of `seq_len` + 1 bytes.

    Neighbours share one byte, so that every byte but the first is predicted once.
    """

    def __init__(self, data: bytes, seq_len: int) -> None:
        self.data = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.data) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Tensor:  # (S+1,) uint8
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq_len
        return self.data[start : start + self.seq_len + 1]


class StdlibBytesDataModule(pl.LightningDataModule):
    """Source files of the running Python's standard library, for training and validation.

    Installed packages and test folders are left out. A tenth of the files, by the SHA-256 of their
    paths, is for validation.

    Args:
        seq_len: S.
        batch_size: sequences per rank.
        max_bytes: use only so many bytes of the files; None uses all.

    Raises:
        ValueError: for sizes that are none; in `setup`, when there is too little text for one
            batch.
    """

    def __init__(
        self, seq_len: int = 128, batch_size: int = 8, *, max_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.seq_len = check_whole(seq_len, name="seq_len")
        self.batch_size = check_whole(batch_size, name="batch_size")
        self.max_bytes = max_bytes
        self.train_data = self.val_data = ByteSequences(b"", seq_len)

    def setup(self, stage: str | None = None) -> None:
        """Read the files."""
        root = Path(sysconfig.get_path("stdlib"))
        train_files, val_files = split_files(root)
        limit = self.max_bytes
        val_limit = None if limit is None else int(limit * VALIDATION)
        self.train_data = ByteSequences(read_files(train_files, limit=limit), self.seq_len)
        self.val_data = ByteSequences(read_files(val_files, limit=val_limit), self.seq_len)
        if len(self.train_data) < self.batch_size or not len(self.val_data):
            raise ValueError(
                f"{root} gives {len(self.train_data)} training and {len(self.val_data)} "
                f"validation sequences of {self.seq_len} bytes, less than a batch; raise "
                "max_bytes, or lower seq_len or batch_size"
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training batches, shuffled; the last partial batch is dropped."""
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation batches, in order."""
        return DataLoader(self.val_data, batch_size=self.batch_size)


def split_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return (training, validation) source files under `root`.

    Both are in the order of the hashes of their relative paths, on which alone the split depends.
    """
    hashed = []
    for folder, subfolders, names in os.walk(root):
        # in place: `os.walk` does not enter the others
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            relative = path.relative_to(root).as_posix()
            hashed.append((hashlib.sha256(relative.encode()).digest(), path))
    hashed.sort()
    # the first 32 bits of a hash, as a share of their range
    bound = int(VALIDATION * 2**32)
    is_val = [int.from_bytes(digest[:4], "big") < bound for digest, _ in hashed]
    train = [path for (_, path), val in zip(hashed, is_val, strict=True) if not val]
    return train, [path for (_, path), val in zip(hashed, is_val, strict=True) if val]


def read_files(files: list[Path], *, limit: int | None) -> bytes:
    """Return the files' bytes one after the other, at most `limit`."""
    data = bytearray()
    for path in files:
        if limit is not None and len(data) >= limit:
            break
        data += path.read_bytes()
    return bytes(data[:limit])
