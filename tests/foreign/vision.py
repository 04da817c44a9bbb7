"""Networks in the style of timm, segmentation_models_pytorch, torchvision's detectors and
diffusers, written anew and small.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from tests.foreign.shelf import image, image_and_label, loader, program


class DropPath(nn.Module):
    """Stochastic depth: drops a whole branch for some samples."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.share)
        return x * keep.div_(1 - self.share)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class InvertedResidual(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze-excite, project, stochastic depth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(inplace=True),
        )
        self.se = SqueezeExcite(wide)
        self.project = nn.Sequential(
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )
        self.drop_path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.project(self.se(self.depthwise(self.expand(x)))))


class TimmClassifier(L.LightningModule):
    """Label smoothing, mixup in the step, a cosine schedule over all steps, an accuracy."""

    def __init__(self, model: nn.Module, mixup: bool = False) -> None:
        super().__init__()
        self.model, self.mixup = model, mixup
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.accuracy = MulticlassAccuracy(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.mixup:
            share = float(torch.distributions.Beta(0.4, 0.4).sample())
            order = torch.randperm(len(x))
            x = share * x + (1 - share) * x[order]
        logits = self.model(x)
        loss = self.criterion(logits, y)
        self.accuracy(logits, y)
        self.log("train/acc", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@program()
def efficientnet() -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        *(InvertedResidual(8) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return TimmClassifier(net, mixup=True), loader(image_and_label)


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


class TimeBlock(nn.Module):
    """A residual block of a diffusion U-Net, shifted by the embedding of the time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.GroupNorm(2, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm2, self.conv2 = (
            nn.GroupNorm(2, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.time = nn.Linear(16, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(hidden)))


class Diffusion(L.LightningModule):
    """Noise prediction with random times; the schedule is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(10, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.blocks = nn.ModuleList(TimeBlock(8) for _ in range(3))
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        clean, _ = batch
        times = torch.randint(0, 10, (len(clean),), device=self.device)
        noise = torch.randn_like(clean)
        kept = self.kept[times][:, None, None, None]
        x = self.first(kept.sqrt() * clean + (1 - kept).sqrt() * noise)
        for block in self.blocks:
            x = block(x, self.embed(times))
        return F.mse_loss(self.last(x), noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


@program()
def diffusion_unet() -> Any:
    return Diffusion(), loader(image_and_label)
