"""Images in a folder a class, as torchvision's ImageFolder reads them, with ImageNet's usual transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from snnpart.errors import ConfigError

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ENLARGED = 256 / 224


def open_images(root: Path, size: int, augment: bool) -> tuple[Dataset[Any], Dataset[Any] | None, tuple[str, ...]]:
    """Training images, validation images (None: the folder has no `val`), and the names of the classes.

    Raises:
        ConfigError: torchvision or the folder is missing, there are no images, or the two parts differ in classes.
    """
    training, held = root / "train", next((root / n for n in ("val", "validation") if (root / n).is_dir()), None)
    if not training.is_dir():
        training, held = root, None
    first = _folder(training, size, augment)
    if held is None:
        return first, None, tuple(first.classes)
    second = _folder(held, size, augment=False)
    if first.classes != second.classes:
        odd = sorted(set(first.classes) ^ set(second.classes))
        raise ConfigError(f"{training} and {held} hold different classes: {odd[:5]}")
    return first, second, tuple(first.classes)


def _folder(path: Path, size: int, augment: bool) -> Any:
    try:
        from torchvision.datasets import ImageFolder
    except ImportError as error:
        raise ConfigError("images are read by torchvision", fix="pip install snnpart[vision]") from error
    try:
        return ImageFolder(str(path), transform=_transform(size, augment))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: {error}", fix="put the images of each class into a folder of its own") from error


def _transform(size: int, augment: bool) -> Any:
    from torchvision import transforms

    crop = (
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        if augment
        else [transforms.Resize(round(size * _ENLARGED)), transforms.CenterCrop(size)]
    )
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)])
