"""Cut an unchanged module into pipeline stages, on two CPU processes.

    python examples/pipeline.py
    python examples/pipeline.py --schedule continuous

`1f1b` gives the losses of training without stages. `continuous` is an asynchronous pipeline: no
stage waits for an update, and stages compute with predicted weights, so that the losses differ.
"""

import argparse

import lightning as L
from digits import DigitsCNN, DigitsDataModule

from lightning_topt import PipelineStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a module in pipeline stages.")
    parser.add_argument("--schedule", choices=("1f1b", "zero_bubble", "continuous"), default="1f1b")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    L.seed_everything(0)
    strategy = (
        PipelineStrategy(stages=2, schedule="continuous", prediction="multistep")
        if options.schedule == "continuous"
        else PipelineStrategy(stages=2, schedule=options.schedule, microbatches=4)
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsCNN(), datamodule=DigitsDataModule())
    if trainer.is_global_zero:
        print(f"plan: {strategy.parallel_plan.summary()}")
        print(f"accuracy: {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
