"""Datasets: typed settings that become train, val and test splits. Imports no torch. Bad data is a ``RecipeError``."""

from trainer.data.images import CIFAR10, Digits, FashionMNIST, ImageFolder
from trainer.data.language import Conversations, Documents, Preferences
from trainer.data.mixture import Mixture
from trainer.data.text import HubText, IMDb, StreamedText, TextFiles

__all__ = [
    "CIFAR10",
    "Conversations",
    "Digits",
    "Documents",
    "FashionMNIST",
    "HubText",
    "IMDb",
    "ImageFolder",
    "Mixture",
    "Preferences",
    "StreamedText",
    "TextFiles",
]
