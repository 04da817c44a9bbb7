"""Two stages of a CNN on scikit-learn's digits, two CPU ranks; the module knows nothing of it.

python examples/pipeline.py
"""

import lightning as L

from lightning_topt import PipelineStrategy
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

if __name__ == "__main__":
    strategy = PipelineStrategy(stages=2, schedule="1f1b", microbatches=4)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsCNN(), datamodule=DigitsDataModule())
    if trainer.is_global_zero:
        print(strategy.parallel_plan.summary())
        print(f"accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")
