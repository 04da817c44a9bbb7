"""Keep samples in memory and on disk: the second run reads nothing from the source.

python examples/cached.py
"""

import tempfile

import lightning as L

from lightning_topt import CachedDataModule
from lightning_topt.cli.tasks.digits import DigitsCNN, DigitsDataModule

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for run in ("first", "second"):
            data = CachedDataModule(
                DigitsDataModule(), directory=directory, memory_bytes=1 << 24, disk_bytes=1 << 24
            )
            trainer = L.Trainer(
                accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False
            )
            trainer.fit(DigitsCNN(), datamodule=data)
            for cache in data.statistics().values():
                print(
                    f"{run} run: {cache.misses} misses, {cache.disk_hits} from disk, "
                    f"{cache.memory_hits} from memory"
                )
            data.close()
