"""An asynchronous pipeline: a CNN on scikit-learn's digits in two stages, on two CPU ranks.

The module knows nothing of it.

python examples/continuous_pipeline.py
"""

import lightning as L

from lightning_topt import PipelineStrategy
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

if __name__ == "__main__":
    strategy = PipelineStrategy(stages=2, schedule="continuous", prediction="multistep")
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
