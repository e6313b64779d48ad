"""Trains the toy method. Planted by test_toy_method.py as worker/trainers/toy.py."""
# ruff: noqa: I001 (sluice.methods.toy does not exist where this file is linted)

import numpy as np
import torch
from torch import Tensor

from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.methods.toy import ToyPlan, ToyRecipe
from sluice.privacy.events import Query
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.sampling import EveryRecord
from worker.trainers.base import BaseTrainer


class Trainer(BaseTrainer[ToyPlan, ToyRecipe]):
    """Guarantee: a record adds a vector of norm at most clip_norm to each sum; docs/guarantees.md#toy."""

    def build(self) -> None:
        sizes = self.schema.channels, self.schema.height, self.schema.width
        self.total = torch.zeros(int(np.prod(sizes)), dtype=torch.float64)

    def make_mechanism(self) -> Mechanism:
        noise = GaussianNoise(stddev=self.plan.noise_stddev, size=len(self.total))
        sampler = EveryRecord(steps=self.plan.known_steps)
        return Mechanism(sampler, noise, self.rng, query=Query.SUM, bound=self.plan.clip_norm)

    def step(self, batch: np.ndarray) -> None:
        rows = self.take_finite(batch)[0].flatten(1).double()
        longer = rows.norm(dim=1, keepdim=True) / (self.mechanism.clip_norm * (1 - 1e-6))
        total = (rows / longer.clamp(min=1)).sum(0)
        self.total += self.mechanism.release(total)

    def build_synthesizer(self) -> ImageSynthesizer:
        architecture = self.architecture(Dense, latent=2, features=self.recipe.features)
        with self.seeded():
            synthesizer = ImageSynthesizer(architecture)
        mean = self.total / self.total.abs().max().clamp(min=1)
        with torch.no_grad():
            synthesizer.network.pixels.bias.copy_(mean)
        return synthesizer

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total}
