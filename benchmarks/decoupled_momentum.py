"""DeMo for `adam_compression.py`: momentum that ranks keep for themselves, but for what they send
of it.

Sizes and bytes are as in `adam_methods`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.adam_methods import Method, Setting
from lightning_topt.communication.methods.demo import Tiles
from lightning_topt.communication.selection.chunk_top_k import Chunks, take_chunk_top_k
from lightning_topt.communication.wire import LevelFormat, MessageFormat


class DeMo(Method):
    """Momentum of each rank in the cosine basis, its largest coefficients sent and taken out of it,
    the sign of their sum.

    `density` is that of all ranks together, so that traffic is the same for any number of them.
    `applied`: "sign" (times the learning rate, the paper's), "adam" (AdamW of the signs), "sum"
    (AdamW of the sum itself).
    """

    def __init__(
        self, setting: Setting, start: Tensor, *, density: float, decay: float = 0.999,
        tile: int = 32, applied: str = "sign", bits: int = 16, cosine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(setting, start)
        self.density, self.decay, self.applied, self.bits = (
            density / setting.ranks,
            decay,
            applied,
            bits,
        )
        self.momentum = torch.zeros(setting.runs, setting.ranks, setting.model.padded)
        places = [0]
        for shape in setting.model.layout.values():
            places.append(places[-1] + shape.numel())
        shapes = setting.model.layout.values()
        self.tiles = [
            (slice(a, b), Tiles.of_shape(s, limit=tile))
            for (a, b), s in zip(pairwise(places), shapes, strict=True)
        ]
        self.tiles = self.tiles if cosine else []
        self.chunk = tile * tile

    def transform(self, x: Tensor, *, back: bool = False) -> Tensor:
        """To the cosine basis and back, parameter by parameter."""
        result = x.clone()
        for part, tiles in self.tiles:
            values = x[..., part]
            result[..., part] = tiles.decode(values.contiguous()) if back else tiles.encode(values)
        return result

    def step(self, gradient: Tensor, step: int, *, share: float) -> None:
        added = self.transform(gradient)
        chunks = Chunks.of_density(added.numel(), chunk=self.chunk, density=self.density)
        chosen = take_chunk_top_k(added.view(-1), self.momentum.view(-1), chunks, decay=self.decay)
        values = chosen.values.bfloat16().float()
        k = min(self.numel, chunks.k // (self.setting.runs * self.ranks))
        form = MessageFormat(self.numel, k, torch.bfloat16)
        nbytes = form.nbytes
        if self.bits < 16:
            levels = LevelFormat(chosen.values.numel(), self.bits, group=max(64, chunks.per_chunk))
            values = levels.round(chosen.values)
            nbytes += LevelFormat(k, self.bits, group=levels.group).nbytes - 2 * k
        self.momentum.view(-1).index_add_(0, chosen.indices, chosen.values - values)
        self.ring(self.ranks * nbytes, passes=1)
        sent = torch.zeros(added.numel())
        sent[chosen.indices.long()] = values
        update = self.transform(sent.view(added.shape).sum(1), back=True)
        update[:, self.numel :] = 0
        if self.applied != "sign":
            self.adam.step(
                self.rows, update.sign() if self.applied == "adam" else update, share=share
            )
            return
        self.adam.steps += 1
        rates = (self.adam.rates * share).unsqueeze(1)
        self.rows[:, : self.adam.decayed].mul_(1 - 0.1 * rates)
        self.rows.sub_(rates * update.sign())
