"""Programs that watch the dtypes of their step, and fits that are not plain."""

from __future__ import annotations

from typing import Any

import torch

from tests.foreign.once_shelf import Built, Net, counted, traced


@counted("dtypes that blocks see under autocast", precision="bf16-mixed")
def dtypes_under_autocast() -> Built:
    module = Net()
    module.net[1].register_forward_hook(
        lambda block, inputs, output: module.trace.append(str(output.dtype))
    )
    return traced(module)


# ---- fits that are not plain


class CountsUpdates(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(
            lambda *args: self.trace.append((self.current_epoch, self.global_step))
        )
        return optimizer


@counted(
    "accumulation whose epochs end in the middle",
    accumulate_grad_batches=4,
    max_epochs=2,
    limit_train_batches=6,
)
def accumulation_cut_by_epochs() -> Built:
    return traced(CountsUpdates())
