"""Plan and train: a small GPT on two CPU ranks within a memory limit.

The module does not know of it.

python examples/train.py
"""

import lightning as L

from lightning_topt import AutoParallelStrategy
from lightning_topt.cli.tasks.byte_lm import ByteGPT, StdlibBytesDataModule

if __name__ == "__main__":
    model = ByteGPT(num_layers=4, hidden=256, num_heads=4, seq_len=64, learning_rate=1e-3)
    data = StdlibBytesDataModule(64, 8, max_bytes=1_000_000)
    strategy = AutoParallelStrategy(memory_limit="300MiB", objective="time")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print(
            f"loss after 20 steps: {float(trainer.callback_metrics['train_loss']):.2f} nats per "
            "byte"
        )
