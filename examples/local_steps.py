"""Train apart and meet every 20 steps (DiLoCo), sending a tenth of how far each rank went.

python examples/local_steps.py
"""

import lightning as L

from lightning_topt import LocalSteps, LocalStepsStrategy
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

if __name__ == "__main__":
    strategy = LocalStepsStrategy(
        LocalSteps(every=20, density=0.1, outer_learning_rate=1.0, outer_momentum=0.0)
    )
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
        print(f"accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")
