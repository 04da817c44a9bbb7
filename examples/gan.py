"""Train a GAN with manual optimization, on two CPU processes.

    python examples/gan.py

Nothing is asked, so the strategy trains as Lightning's `ddp` does. Each of the two backward passes
leaves parameters out, which DDP is told by the ending of the strategy's name. Plans and limits are
in docs/how_to/manual_optimization.md.
"""

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import lightning_topt  # noqa: F401  (registers the strategy names)

PIXELS = 8 * 8


class GAN(L.LightningModule):
    def __init__(self, *, latent: int = 16, width: int = 128, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent, self.learning_rate = latent, learning_rate
        self.generator = nn.Sequential(
            nn.Linear(latent, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, PIXELS),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def judge(self, images: Tensor, *, real: bool) -> Tensor:
        """Return the discriminator's loss where all `images` are real, or none is."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, images: Tensor, batch_idx: int) -> None:  # (B, PIXELS)
        of_generator, of_discriminator = self.optimizers()
        made = self.generator(torch.randn(len(images), self.latent, device=self.device))

        self.toggle_optimizer(of_generator)
        generator_loss = self.judge(made, real=True)
        of_generator.zero_grad()
        self.manual_backward(generator_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        loss = (self.judge(images, real=True) + self.judge(made.detach(), real=False)) / 2
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log_dict({"generator": generator_loss, "discriminator": loss}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        options = {"lr": self.learning_rate, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **options),
            torch.optim.Adam(self.discriminator.parameters(), **options),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN with manual optimization.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    L.seed_everything(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # in [-1, 1]
    trainer = L.Trainer(
        strategy="topt_find_unused_parameters_true",
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(GAN(), DataLoader(images, 32, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"plan: {trainer.strategy.parallel_plan.summary()}")
        losses = {name: float(loss) for name, loss in trainer.callback_metrics.items()}
        print(f"losses: {', '.join(f'{name} {loss:.2f}' for name, loss in losses.items())}")


if __name__ == "__main__":
    main()
