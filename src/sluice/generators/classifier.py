"""Image classifiers, as domain adaptation releases them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.generators.architecture import Architecture, NetworkInFiles

WEIGHTS, ARCHITECTURE = "classifier.safetensors", "classifier.json"
# Images classified at a time.
CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class ClassifierShape(Architecture):
    """Two convolutions with stride 2, a dense layer to the latents, and one from there to the classes."""

    kind: ClassVar[str] = "latent-classifier"
    limits: ClassVar[dict[str, tuple[int, int]]] = {"classes": (2, 1000), "features": (1, 1024)}

    features: int = 16
    latent: int = 32

    def network(self) -> "Network":
        return Network(self)


class Encoder(nn.Module):
    """Latents of images, each computed from its own image alone."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        height, width = (-(-side // 4) for side in (shape.height, shape.width))
        self.first = nn.Conv2d(shape.channels, shape.features, 5, 2, 2)
        self.second = nn.Conv2d(shape.features, 2 * shape.features, 5, 2, 2)
        self.latent = nn.Linear(2 * shape.features * height * width, shape.latent)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first((images + 1) / 2))))
        latents: Tensor = self.latent(x.flatten(1))
        return latents


class Network(nn.Module):
    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(shape), nn.Linear(shape.latent, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.encoder(images)))
        return logits


class Classifier(NetworkInFiles):
    """A trained classifier of images."""

    file_names: ClassVar[tuple[str, str]] = (WEIGHTS, ARCHITECTURE)

    @classmethod
    def read_architecture(cls, body: Any) -> Architecture:
        return ClassifierShape.from_dict(body)

    @torch.inference_mode()
    def predict(self, images: np.ndarray) -> np.ndarray:
        """The most likely classes of images, uint8 as N, H, W, C."""
        shape, device = self.architecture, next(self.network.parameters()).device
        if images.dtype != np.uint8 or images.shape[1:] != (shape.height, shape.width, shape.channels):
            raise ValueError("give images as uint8, of the shape that the classifier was trained for")
        labels = np.empty(len(images), dtype=np.int64)
        for start in range(0, len(images), CHUNK):
            chunk = torch.from_numpy(images[start : start + CHUNK]).to(device).permute(0, 3, 1, 2)
            labels[start : start + CHUNK] = self.network(chunk / 127.5 - 1).argmax(1).cpu().numpy()
        return labels
