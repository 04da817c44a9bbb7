"""A Hydra app of your own, in the form of lightning-hydra-template; its groups are in `conf/`.

    python examples/hydra_app/train.py
    python examples/hydra_app/train.py trainer.strategy=topt
    python examples/hydra_app/train.py trainer=topt_limited trainer.strategy.memory_limit=1GiB

The first trains under Lightning's `ddp`. One word more, and the fit is planned. The third gives the
strategy options; `conf/trainer/topt_limited.yaml` names them.
"""

from pathlib import Path

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    L.seed_everything(config.seed, workers=True)
    datamodule = instantiate(config.data)
    model = instantiate(config.model)
    trainer: L.Trainer = instantiate(config.trainer, _convert_="all")
    trainer.fit(model, datamodule=datamodule)
    if trainer.is_global_zero:
        folder = Path(HydraConfig.get().runtime.output_dir)
        plan = getattr(trainer.strategy, "parallel_plan", None)
        if plan is not None:
            plan.save(folder / "plan.yaml")
            print(f"plan: {plan.summary()}")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(f"metrics: {', '.join(f'{name} {value:.3f}' for name, value in metrics.items())}")
        print(f"folder: {folder}")


if __name__ == "__main__":
    main()
