"""A network with the interface of torchvision's detectors, small."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.foreign.shelf import image, loader, program


class Detector(nn.Module):
    """torchvision's interface: lists of images and of targets in, a dictionary of losses out."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.classify, self.locate = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        height = max(picture.shape[1] for picture in images)
        width = max(picture.shape[2] for picture in images)
        stacked = torch.stack(
            [
                F.pad(picture, (0, width - picture.shape[2], 0, height - picture.shape[1]))
                for picture in images
            ]
        )
        features = self.backbone(stacked)
        scores, places = self.classify(features), self.locate(features)
        classification, location = [], []
        for number, target in enumerate(targets):
            x, y = (target["boxes"][:, :2] // 2).long().unbind(-1)
            positive = torch.zeros_like(scores[number])
            positive[target["labels"], y, x] = 1.0
            classification.append(F.binary_cross_entropy_with_logits(scores[number], positive))
            location.append(F.smooth_l1_loss(places[number][:, y, x].T, target["boxes"]))
        return {
            "classification": torch.stack(classification).mean(),
            "location": torch.stack(location).mean(),
        }


class Detection(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Detector()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        losses = self.model(list(images), [dict(target.items()) for target in targets])
        self.log_dict(
            {f"train_{name}": value for name, value in losses.items()}, batch_size=len(images)
        )
        return sum(losses.values())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)


def picture_with_boxes(source: torch.Generator, index: int) -> tuple[Tensor, dict[str, Tensor]]:
    count, size = 1 + index % 3, 8 + 2 * (index % 2)
    boxes = torch.cat([torch.randint(0, 8, (count, 2), generator=source), torch.ones(count, 2)], -1)
    return image(source, size=size), {
        "boxes": boxes,
        "labels": torch.randint(0, 4, (count,), generator=source),
    }


def as_lists(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


@program()
def detection_with_lists_of_dicts() -> Any:
    return Detection(), loader(picture_with_boxes, collate_fn=as_lists)
