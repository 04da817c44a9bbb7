"""Two CPU ranks share the optimizer step of an MLP on scikit-learn's digits.

Each update takes a matrix factorisation.

python examples/parallel_optimizer.py
"""

from typing import Any

import lightning as L
import torch
from digits import DigitsDataModule
from torch import Tensor, nn

from lightning_topt import ParallelOptimizerStep


class SignDescent(torch.optim.Optimizer):
    """Step by the orthogonal factor of each gradient matrix.

    An expensive update that needs unsharded parameters.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                direction = self.state[parameter].setdefault(
                    "momentum", torch.zeros_like(parameter)
                )
                direction.lerp_(parameter.grad, 0.1)
                if parameter.dim() == 2:
                    left, _, right = torch.linalg.svd(direction, full_matrices=False)
                    parameter -= group["lr"] * left @ right
                else:
                    parameter -= group["lr"] * direction.sign()
        return loss


class DigitsMLP(L.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", correct, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return SignDescent(self.parameters(), lr=0.02)


if __name__ == "__main__":
    callback = ParallelOptimizerStep()
    trainer = L.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=5, callbacks=[callback],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(DigitsMLP(), datamodule=DigitsDataModule())
    if trainer.is_global_zero:
        for decision in callback.decisions:
            print(decision.reason)
        print(f"accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")
