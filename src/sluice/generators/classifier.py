"""What an adaptation releases: a classifier of images; weights as safetensors, architecture as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from sluice.generators.architecture import UnfitSynthesizer

WEIGHTS, ARCHITECTURE = "classifier.safetensors", "classifier.json"
LIMITS = {
    "height": (8, 64), "width": (8, 64), "channels": (1, 4), "classes": (2, 1000), "features": (1, 1024),
    "latent": (1, 4096),
}  # fmt: skip
# Images are looked at this many at a time.
CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class ClassifierShape:
    """Two convolutions that halve, a dense layer to the latents, and one from there to the classes."""

    kind: ClassVar[str] = "latent-classifier"
    version: ClassVar[int] = 1

    height: int
    width: int
    channels: int
    classes: int
    features: int = 16
    latent: int = 32

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UnfitSynthesizer(f"{name} is {value!r}; give a whole number from {least} to {most}")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version, **asdict(self)}

    @classmethod
    def from_dict(cls, body: Any) -> Self:
        known = {"kind", "version", *(field.name for field in fields(cls))}
        if not isinstance(body, dict) or set(body) != known:
            raise UnfitSynthesizer(f"an architecture has exactly {sorted(known)}")
        if (body["kind"], body["version"]) != (cls.kind, cls.version):
            raise UnfitSynthesizer(f"the architecture is not a {cls.kind} of version {cls.version}")
        return cls(**{name: body[name] for name in LIMITS})


class Encoder(nn.Module):
    """Latents of images, each from its own image alone."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        height, width = (-(-side // 4) for side in (shape.height, shape.width))
        self.first = nn.Conv2d(shape.channels, shape.features, 5, 2, 2)
        self.second = nn.Conv2d(shape.features, 2 * shape.features, 5, 2, 2)
        self.latent = nn.Linear(2 * shape.features * height * width, shape.latent)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first((images + 1) / 2))))
        return self.latent(x.flatten(1))


class Network(nn.Module):
    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(shape), nn.Linear(shape.latent, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.scored(self.encoder(images))

    def scored(self, latents: Tensor) -> Tensor:
        return self.head(F.relu(latents))


class Classifier:
    """A trained classifier. It predicts, and knows no records."""

    def __init__(self, architecture: ClassifierShape, network: Network | None = None) -> None:
        self.architecture = architecture
        self.network = network or Network(architecture)

    @torch.inference_mode()
    def predict(self, images: np.ndarray) -> np.ndarray:
        """The likeliest class of images, uint8 as N, H, W, C."""
        shape, device = self.architecture, next(self.network.parameters()).device
        if images.dtype != np.uint8 or images.shape[1:] != (shape.height, shape.width, shape.channels):
            raise ValueError("give images as uint8, of the shape that the classifier was made for")
        found = np.empty(len(images), dtype=np.int64)
        for start in range(0, len(images), CHUNK):
            some = torch.from_numpy(images[start : start + CHUNK]).to(device).permute(0, 3, 1, 2)
            found[start : start + CHUNK] = self.network(some / 127.5 - 1).argmax(1).cpu().numpy()
        return found

    def to_files(self) -> dict[str, bytes]:
        weights = {name: value.cpu().contiguous() for name, value in self.network.state_dict().items()}
        body = json.dumps(self.architecture.to_dict(), sort_keys=True, indent=2) + "\n"
        return {WEIGHTS: save(weights), ARCHITECTURE: body.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Reads exactly what `to_files` writes: these tensors, these shapes, finite numbers, nothing else."""
        try:
            shape = ClassifierShape.from_dict(json.loads(files[ARCHITECTURE]))
            weights = load(files[WEIGHTS])
        except UnfitSynthesizer:
            raise
        except Exception as problem:
            raise UnfitSynthesizer("the files cannot be read as a classifier") from problem
        network = Network(shape)
        wanted = {name: (value.shape, value.dtype) for name, value in network.state_dict().items()}
        if {name: (value.shape, value.dtype) for name, value in weights.items()} != wanted:
            raise UnfitSynthesizer("the tensors are not those of the architecture")
        if not all(value.isfinite().all() for value in weights.values()):
            raise UnfitSynthesizer("a weight is not a finite number")
        network.load_state_dict(weights)
        return cls(shape, network)
