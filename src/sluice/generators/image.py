"""Labelled images from a network; weights as safetensors, architecture as JSON."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from sluice.generators.architecture import Architecture, UnfitSynthesizer
from sluice.generators.atlas import Atlas
from sluice.generators.dcgan import DCGAN
from sluice.generators.dense import Dense
from sluice.generators.residual import Residual
from sluice.generators.upsampling import Upsampling

KINDS: dict[str, type[Architecture]] = {cls.kind: cls for cls in (DCGAN, Dense, Residual, Upsampling, Atlas)}
WEIGHTS, ARCHITECTURE = "synthesizer.safetensors", "synthesizer.json"
# Samples are made this many at a time, so that fewer of them are the first of more.
CHUNK = 256


def read_architecture(body: Any) -> Architecture:
    if not isinstance(body, dict) or body.get("kind") not in KINDS:
        raise UnfitSynthesizer(f"the architecture is none of {sorted(KINDS)}")
    return KINDS[body["kind"]].from_dict(body)


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

    def __init__(self, architecture: Architecture, network: nn.Module | None = None) -> None:
        self.architecture = architecture
        self.network = network or architecture.network()

    def sample(self, count: int, *, seed: int, label: int | None = None) -> Sample:
        """The same images for the same seed on the same build; those of a smaller count come first."""
        shape, start = self.architecture, 0
        images = np.empty((count, shape.height, shape.width, shape.channels), dtype=np.uint8)
        labels = np.empty(count, dtype=np.int64)
        for some in self.draws(count, seed=seed, label=label):
            end = start + len(some.labels)
            images[start:end], labels[start:end], start = some.images, some.labels, end
        return Sample(images, labels)

    def draws(
        self, count: int, *, seed: int, label: int | None = None, balanced: bool = False
    ) -> Iterator[Sample]:
        """The same, a chunk at a time; `balanced` takes the classes in turn."""
        shape, device = self.architecture, next(self.network.parameters()).device
        if label is not None and not 0 <= label < shape.classes:
            raise ValueError(f"label is {label}; give a number from 0 to {shape.classes - 1}")
        source = torch.Generator().manual_seed(seed)
        for start in range(0, count, CHUNK):
            latents = torch.randn(CHUNK, shape.latent, generator=source)
            wanted = torch.randint(shape.classes, (CHUNK,), generator=source)
            if label is not None:
                wanted.fill_(label)
            elif balanced:
                wanted = torch.arange(start, start + CHUNK) % shape.classes
            with torch.inference_mode():
                made = self.network(latents.to(device), wanted.to(device)).permute(0, 2, 3, 1).cpu()
            kept = min(CHUNK, count - start)
            images = ((made[:kept] + 1) * 127.5).round().to(torch.uint8)
            yield Sample(images.numpy(), wanted[:kept].numpy())

    def to_files(self) -> dict[str, bytes]:
        weights = {name: value.cpu().contiguous() for name, value in self.network.state_dict().items()}
        body = json.dumps(self.architecture.to_dict(), sort_keys=True, indent=2) + "\n"
        return {WEIGHTS: save(weights), ARCHITECTURE: body.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Reads exactly what `to_files` writes: these tensors, these shapes, finite numbers, nothing else."""
        try:
            shape = read_architecture(json.loads(files[ARCHITECTURE]))
            weights = load(files[WEIGHTS])
        except UnfitSynthesizer:
            raise
        except Exception as problem:
            raise UnfitSynthesizer("the files cannot be read as a synthesizer") from problem
        network = shape.network()
        wanted = {name: (value.shape, value.dtype) for name, value in network.state_dict().items()}
        if {name: (value.shape, value.dtype) for name, value in weights.items()} != wanted:
            raise UnfitSynthesizer("the tensors are not those of the architecture")
        if not all(math.isfinite(value.sum()) for value in weights.values()):
            raise UnfitSynthesizer("a weight is not a finite number")
        network.load_state_dict(weights)
        return cls(shape, network)
