"""Images that the evaluations of both sides read: a fixed few of a real data set, or random ones.

A source is a name of `snnpart.vision`'s data sources ("digits"), the path of a data set's factory, a folder with a
folder of images a class, or a file of arrays. Its first validation samples are taken, as colour images of the size
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.vision.build import find
from snnpart.vision.data.sources import SOURCES, as_split
from tools.bench.vision_models import CLASSES

IMAGES = 64
"""A batch goes round among so many."""


def images_of(source: str | None, size: int) -> tuple[Tensor, Tensor]:
    """Images [n, 3, size, size] and their classes [n]; `source` None: random ones.

    Raises:
        ConfigError: the source is not known or cannot be read.
        ValueError: what it holds are no images, or of more classes than the networks have.
    """
    generator = torch.Generator().manual_seed(0)
    if source is None:
        images = torch.randn(IMAGES, 3, size, size, generator=generator)
        return images, torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    data: Any = _opened(source, size)
    samples = [data[index] for index in range(min(IMAGES, len(data)))]
    classes = torch.tensor([int(target) for _, target in samples])
    if int(classes.max()) >= CLASSES:
        raise ValueError(f"{source}: class {int(classes.max())}, but the networks have {CLASSES}")
    return torch.stack([_fitted(torch.as_tensor(image), size, source) for image, _ in samples]), classes


def _opened(source: str, size: int) -> Any:
    if Path(source).is_dir():
        return SOURCES["image_folder"](source, size=size, augment=False).validation
    if Path(source).is_file():
        return SOURCES["arrays"](source).validation
    return as_split(find("images", source, SOURCES)()).validation


def _fitted(image: Tensor, size: int, source: str) -> Tensor:
    """A sample as [3, size, size]: grey ones in three equal channels."""
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"{source}: a sample has shape {list(image.shape)}, not [1 or 3, H, W]")
    if image.shape[1:] != (size, size):
        image = F.interpolate(image[None].float(), size=(size, size), mode="bilinear")[0]
    return image.float().expand(3, -1, -1)


def repeated(images: Tensor, count: int, first: int = 0) -> Tensor:
    """`count` of them in turn from the `first` on."""
    return images[torch.arange(first, first + count) % len(images)]
