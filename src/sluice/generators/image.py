"""Labelled images from a network; weights as safetensors, architecture as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from sluice.generators.architecture import Architecture, NetworkInFiles, UnfitSynthesizer
from sluice.generators.atlas import Atlas
from sluice.generators.dcgan import DCGAN
from sluice.generators.dense import Dense
from sluice.generators.residual import Residual
from sluice.generators.upsampling import Upsampling

KINDS: dict[str, type[Architecture]] = {cls.kind: cls for cls in (DCGAN, Dense, Residual, Upsampling, Atlas)}
WEIGHTS, ARCHITECTURE = "synthesizer.safetensors", "synthesizer.json"
# Samples are generated this many at a time, so that a smaller count is a prefix of a larger one.
CHUNK = 256


@dataclass(frozen=True)
class Sample:
    """Images, uint8 as N, H, W, C, and their labels."""

    images: np.ndarray
    labels: np.ndarray


class ImageSynthesizer(NetworkInFiles):
    """A trained generator of labelled images.

    Guarantee: sampling is post-processing; any number of samples costs nothing. The labels of a sample are
    chosen by the caller or uniformly, never by their frequency among the records.
    """

    file_names: ClassVar[tuple[str, str]] = (WEIGHTS, ARCHITECTURE)

    @classmethod
    def read_architecture(cls, body: Any) -> Architecture:
        if not isinstance(body, dict) or body.get("kind") not in KINDS:
            raise UnfitSynthesizer(f"the architecture is none of {sorted(KINDS)}")
        return KINDS[body["kind"]].from_dict(body)

    def sample(self, count: int, *, seed: int, label: int | None = None) -> Sample:
        """The same images for the same seed and build; a smaller count is a prefix of a larger one."""
        shape, start = self.architecture, 0
        images = np.empty((count, shape.height, shape.width, shape.channels), dtype=np.uint8)
        labels = np.empty(count, dtype=np.int64)
        for chunk in self.draws(count, seed=seed, label=label):
            end = start + len(chunk.labels)
            images[start:end], labels[start:end], start = chunk.images, chunk.labels, end
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
            labels = torch.randint(shape.classes, (CHUNK,), generator=source)
            if label is not None:
                labels.fill_(label)
            elif balanced:
                labels = torch.arange(start, start + CHUNK) % shape.classes
            with torch.inference_mode():
                floats = self.network(latents.to(device), labels.to(device)).permute(0, 2, 3, 1).cpu()
            size = min(CHUNK, count - start)
            images = ((floats[:size] + 1) * 127.5).round().to(torch.uint8)
            yield Sample(images.numpy(), labels[:size].numpy())
