"""Labelled images from a convolutional generator; weights as safetensors, architecture as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from worker.patches import Size, doubled, half, halving_kernel

SLOPE = 0.2
KIND, VERSION = "conditional-dcgan-generator", 1
WEIGHTS, ARCHITECTURE = "synthesizer.safetensors", "synthesizer.json"
# Samples are made this many at a time, so that fewer of them are the first of more.
CHUNK = 256


class UnfitSynthesizer(ValueError):
    """The files do not hold exactly one synthesizer of a known kind."""


@dataclass(frozen=True, kw_only=True)
class ImageArchitecture:
    """Public facts: the shape of an image, how many classes, how wide the network."""

    height: int
    width: int
    channels: int
    classes: int
    features: int = 128
    latent: int = 128

    def __post_init__(self) -> None:
        limits = {"height": (8, 64), "width": (8, 64), "channels": (1, 4), "classes": (1, 1000)}
        limits |= {"features": (2, 1024), "latent": (1, 4096)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UnfitSynthesizer(f"{name} is {value!r}; give a whole number from {least} to {most}")
        if self.features % 2:
            raise UnfitSynthesizer("features is odd: half of them are for the label")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": KIND, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, body: Any) -> Self:
        known = {"kind", "version", *(field.name for field in fields(cls))}
        if not isinstance(body, dict) or set(body) != known:
            raise UnfitSynthesizer(f"an architecture has exactly {sorted(known)}")
        if (body["kind"], body["version"]) != (KIND, VERSION):
            raise UnfitSynthesizer(f"the architecture is not a {KIND} of version {VERSION}")
        return cls(**{name: value for name, value in body.items() if name not in ("kind", "version")})


def halvings(height: int, width: int) -> list[Size]:
    """Sizes from the image down to about 4 x 4, each half of the one before: 28, 14, 7, 4."""
    sizes = [(height, width)]
    while max(sizes[-1]) > 4 or len(sizes) < 3:
        sizes.append(half(sizes[-1]))
    return sizes


class Generator(nn.Module):
    """Images in [-1, 1] from latents and labels: the generator of "Private GANs, Revisited" at any size.

    The layers are transposed convolutions, computed as products with their weights whose pieces are then laid
    over each other.
    """

    def __init__(self, shape: ImageArchitecture) -> None:
        super().__init__()
        *sizes, self.start = halvings(shape.height, shape.width)
        self.sizes = sizes[::-1]
        widest = shape.features << len(sizes) - 1
        self.seed = nn.ConvTranspose2d(shape.latent, widest // 2, self.start)
        self.label = nn.ConvTranspose2d(shape.classes, widest // 2, self.start)
        widths = [*(widest >> level for level in range(len(sizes))), shape.channels]
        self.body = nn.ModuleList(
            nn.ConvTranspose2d(given, made, halving_kernel(size), stride=2, padding=1)
            for given, made, size in zip(widths, widths[1:], self.sizes, strict=False)
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        seeds = (latents @ pieces(self.seed)).unflatten(1, (*self.start, -1)) + self.seed.bias
        marks = pieces(self.label)[labels].unflatten(1, (*self.start, -1)) + self.label.bias
        x = torch.cat([seeds, marks], 3)
        for layer, size in zip(self.body, self.sizes, strict=True):
            x = doubled(F.leaky_relu(x.flatten(1, 2), SLOPE) @ pieces(layer), size) + layer.bias
        return torch.tanh(x).permute(0, 3, 1, 2)


def pieces(layer: nn.ConvTranspose2d) -> Tensor:
    """What one input channel adds around its place: channels, kernel * channels made."""
    return layer.weight.permute(0, 2, 3, 1).flatten(1)


@dataclass(frozen=True)
class Sample:
    """Images, uint8 as N, H, W, C, and their labels."""

    images: np.ndarray
    labels: np.ndarray


class ImageSynthesizer:
    """A trained generator. It samples, and knows no records.

    Guarantee: sampling is post-processing; any number of samples costs nothing. The labels of a sample are
    chosen by the caller or uniformly, never from how often they were among the records.
    """

    def __init__(self, architecture: ImageArchitecture, network: Generator | None = None) -> None:
        self.architecture = architecture
        self.network = network or Generator(architecture)

    def sample(self, count: int, *, seed: int, label: int | None = None) -> Sample:
        """The same images for the same seed on the same build; those of a smaller count come first."""
        shape, device = self.architecture, next(self.network.parameters()).device
        if label is not None and not 0 <= label < shape.classes:
            raise ValueError(f"label is {label}; give a number from 0 to {shape.classes - 1}")
        source = torch.Generator().manual_seed(seed)
        images = np.empty((count, shape.height, shape.width, shape.channels), dtype=np.uint8)
        labels = np.empty(count, dtype=np.int64)
        for start in range(0, count, CHUNK):
            latents = torch.randn(CHUNK, shape.latent, generator=source)
            wanted = torch.randint(shape.classes, (CHUNK,), generator=source)
            if label is not None:
                wanted.fill_(label)
            with torch.inference_mode():
                made = self.network(latents.to(device), wanted.to(device)).permute(0, 2, 3, 1).cpu()
            kept = min(CHUNK, count - start)
            images[start : start + kept] = ((made[:kept] + 1) * 127.5).round().to(torch.uint8).numpy()
            labels[start : start + kept] = wanted[:kept].numpy()
        return Sample(images, labels)

    def to_files(self) -> dict[str, bytes]:
        weights = {name: value.cpu().contiguous() for name, value in self.network.state_dict().items()}
        body = json.dumps(self.architecture.to_dict(), sort_keys=True, indent=2) + "\n"
        return {WEIGHTS: save(weights), ARCHITECTURE: body.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Reads exactly what `to_files` writes: these tensors, these shapes, finite numbers, nothing else."""
        try:
            shape = ImageArchitecture.from_dict(json.loads(files[ARCHITECTURE]))
            weights = load(files[WEIGHTS])
        except UnfitSynthesizer:
            raise
        except Exception as problem:
            raise UnfitSynthesizer("the files cannot be read as a synthesizer") from problem
        network = Generator(shape)
        wanted = {name: (value.shape, value.dtype) for name, value in network.state_dict().items()}
        if {name: (value.shape, value.dtype) for name, value in weights.items()} != wanted:
            raise UnfitSynthesizer("the tensors are not those of the architecture")
        if not all(math.isfinite(value.sum()) for value in weights.values()):
            raise UnfitSynthesizer("a weight is not a finite number")
        network.load_state_dict(weights)
        return cls(shape, network)
