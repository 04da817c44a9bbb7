"""Send 1 % of the gradient, and see what that saves: a CNN on scikit-learn's digits, two CPU ranks.

python examples/compressed.py
"""

import lightning as L

from lightning_topt import CompressedDDPStrategy, TopK
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

if __name__ == "__main__":
    # On several nodes, gradients are summed inside each node first.
    strategy = CompressedDDPStrategy(TopK(density=0.01, warmup_steps=40))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsCNN(), datamodule=DigitsDataModule())
    if trainer.is_global_zero:
        seen = trainer.callback_metrics
        sent, dense = (float(seen[f"exchange/{name}bytes_per_step"]) for name in ("", "dense_"))
        print(
            f"{sent / 1e3:.1f} kB per step instead of {dense / 1e3:.1f}; accuracy "
            f"{float(seen['val_accuracy']):.3f}"
        )
