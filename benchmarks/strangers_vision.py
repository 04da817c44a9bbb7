"""Vision families of the prediction benchmark: small faithful versions, written here, used by no
other benchmark.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualPair(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 64 x 64 images."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 5, 2, 2, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        pairs = [(a, b, s) for a, b, s in widths] + [(b, b, 1) for _, b, _ in widths]
        self.layers = nn.Sequential(
            *(ResidualPair(*pair) for pair in sorted(pairs, key=lambda p: (p[1], -p[2], p[0])))
        )
        self.head = nn.Linear(512, classes)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        features = self.layers(self.stem(images)).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(features), labels)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, LayerNorm, an inverted bottleneck and a layer scale (Liu et al., arXiv
    2201.03545).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Four stages for 64 x 64 images."""

    def __init__(
        self, widths: Sequence[int] = (64, 128, 256, 512), depths: Sequence[int] = (2, 2, 4, 2)
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, 4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNextBlock(width) for _ in range(depth)))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        x = self.stages[0](self.stem(images))
        for down, stage in zip(self.downs, self.stages[1:], strict=False):
            x = stage(down(x))
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class VitBlock(nn.Module):
    """Pre-norm attention and MLP (Dosovitskiy et al., arXiv 2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches of 8 x 8 pixels of 64 x 64 images."""

    def __init__(self, width: int = 320, heads: int = 5, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection (Howard et al., arXiv
    1905.02244).
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = 6 * inputs
        self.expand = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, 5, stride, 2, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.Hardswish(),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.ReLU(),
            nn.Conv2d(width // 4, width, 1),
        )
        self.project = nn.Sequential(
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * functional.hardsigmoid(self.squeeze(y)))
        return x + y if self.same else y


class MobileNet(nn.Module):
    """Inverted residuals for 96 x 96 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish()
        )
        widths = [
            (24, 32, 2),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            *[(128, 128, 1)] * 3,
        ]
        widths += [(128, 192, 2), *[(192, 192, 1)] * 2]
        self.layers = nn.Sequential(*(InvertedResidual(*shape) for shape in widths))
        self.head = nn.Sequential(
            nn.Linear(192, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, 100)
        )

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(
            self.head(self.layers(self.stem(images)).mean(dim=(2, 3))), labels
        )


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with GroupNorm and SiLU."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
    )


class UNet(nn.Module):
    """Four resolutions with skips (Ronneberger et al., arXiv 1505.04597), for segmentation of 64 x
    64 images.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 512)) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            double_convolution(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joins = nn.ModuleList(double_convolution(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 10, 1)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        skips, x = [], images
        for index, down in enumerate(self.downs):
            x = down(x if index == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return functional.cross_entropy(self.head(x), labels)


class ConvVae(nn.Module):
    """A convolutional variational autoencoder (Kingma & Welling, arXiv 1312.6114) of 64 x 64
    images.
    """

    def __init__(self, widths: Sequence[int] = (48, 96, 192, 384), latent: int = 256) -> None:
        super().__init__()
        downs, ups = (
            zip((3, *widths), widths, strict=False),
            zip(widths[::-1], (*widths[-2::-1], 32), strict=True),
        )
        self.encoder = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
                for a, b in downs
            )
        )
        self.inner = widths[-1] * 16
        self.statistics = nn.Linear(self.inner, 2 * latent)
        self.start = nn.Linear(latent, self.inner)
        self.decoder = nn.Sequential(
            *(
                nn.Sequential(
                    nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)
                )
                for a, b in ups
            )
        )
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        (images,) = batch
        mean, log_variance = self.statistics(self.encoder(images).flatten(1)).chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        decoded = self.head(self.decoder(self.start(sample).view(len(images), -1, 4, 4)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return functional.mse_loss(decoded, images) + 1e-3 * divergence


def images(batch_size: int, side: int, **labels: Any) -> tuple[Tensor, ...]:
    """Random images, with labels of `classes` for each image or, with `dense`, for each pixel."""
    x = torch.rand(batch_size, 3, side, side)
    if not labels:
        return (x,)
    shape = (batch_size, side, side) if labels.get("dense") else (batch_size,)
    return x, torch.randint(0, labels["classes"], shape)
