"""What all trainers share: plan, records, mechanism, step counts, checkpoints, the finished check."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.classifier import Classifier
from sluice.generators.dcgan import DCGAN
from sluice.generators.dense import Dense
from sluice.generators.image import ImageSynthesizer
from sluice.generators.residual import Residual
from sluice.generators.upsampling import Upsampling
from sluice.methods.base import Plan, trainable
from sluice.methods.recipe import Recipe
from worker.mechanisms.mechanism import Mechanism
from worker.mechanisms.noise import Rng
from worker.mechanisms.sampling import Records

P = TypeVar("P", bound=Plan)
R = TypeVar("R", bound=Recipe)
A = TypeVar("A")

# Generator architectures by the names that recipes give them.
NETWORKS = {"conv": DCGAN, "dcgan": DCGAN, "dense": Dense, "residual": Residual, "upsampling": Upsampling}


@dataclass(frozen=True)
class Progress:
    """Step counts: all that is published of a training while it runs."""

    step: int
    steps: int


class BaseTrainer(Generic[P, R]):
    """Trains by a plan on private records.

        training = TRAINERS[plan.kind](plan, records, rng=SecureRng(), recipe=recipe, device="cpu")
        training.restore(tensors)               # only when continuing from a checkpoint
        for progress in training.steps():       # one step each; stop iterating to cancel
            ...                                 # heartbeat, training.checkpoint(), training.diagnostics()
        synthesizer = training.synthesizer()    # refuses unless every planned step was taken, exactly once

    A subclass builds its networks in `build` and its mechanism in `make_mechanism`. `step` turns a batch into
    one release of the mechanism and learns from it; `public_step` learns without records, as often as
    `public_steps_planned` says, after the last release. Training fails only with a `Failure`, and records
    influence that only through noised releases.

    Guarantee: the mechanism's event is the plan's event, and there is no synthesizer before the mechanism has
    released exactly as often as planned. A checkpoint includes these counts, so that a restored training
    repeats no release. It has no random state: who continues draws fresh randomness.
    """

    on_cpu: ClassVar[bool] = False  # whether the trainer runs on the CPU whatever device is available

    def __init__(
        self,
        plan: P,
        records: Records,
        *,
        rng: Rng,
        recipe: R | None = None,
        device: str | None = None,
        source: Records | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.plan, self.records, self.source, self.rng = plan, records, source, rng
        self.recipe: R = recipe or recipe_of(plan, device)
        self.device = "cpu" if self.on_cpu else device
        self.schema = require_images(records.schema)
        self.classes = len(self.schema.classes)
        self.public_steps, self.public_steps_planned = counter(), 0
        self.measured: dict[str, float] = {}
        self.build()
        self.mechanism = self.make_mechanism()
        if self.mechanism.event != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)

    def build(self) -> None:
        """Makes everything that is not private: networks, optimizers, public bases."""
        raise NotImplementedError

    def make_mechanism(self) -> Mechanism:
        raise NotImplementedError

    def step(self, batch: np.ndarray) -> None:
        """Releases once, and learns from the release."""
        raise NotImplementedError

    def public_step(self) -> None:
        """Learns without records: post-processing of all releases."""

    def build_synthesizer(self) -> ImageSynthesizer | Classifier:
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Everything that learning changes, by name, as tensors that share memory with the trainer's own."""
        raise NotImplementedError

    def steps(self) -> Iterator[Progress]:
        """Takes the remaining steps, and yields the counts after each."""
        for batch in self.mechanism.batches(self.records):
            self.step(batch)
            yield self.progress()
        yield from self.take_public_steps()

    def take_public_steps(self) -> Iterator[Progress]:
        while self.public_steps < self.public_steps_planned:
            self.public_step()
            self.public_steps += 1
            yield self.progress()

    def progress(self) -> Progress:
        taken = self.mechanism.drawn + int(self.public_steps)
        return Progress(taken, self.plan.known_steps + self.public_steps_planned)

    def all_state(self) -> dict[str, Tensor]:
        return {**self.mechanism.state(), "public_steps": self.public_steps, **self.state()}

    def checkpoint(self) -> dict[str, Tensor]:
        """Everything needed to continue except randomness. Private: for the vault."""
        return snapshot(self.all_state())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from a checkpoint, with fresh randomness under the same charge."""
        load_into(self.all_state(), tensors)

    def diagnostics(self) -> dict[str, float]:
        """Measurements of the last step. They depend on records: for the curator, in the vault."""
        return {name: value for name, value in self.measured.items() if math.isfinite(value)}

    def synthesizer(self) -> ImageSynthesizer | Classifier:
        finished = self.mechanism.finished and int(self.public_steps) == self.public_steps_planned
        if not finished or self.mechanism.steps != self.plan.known_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        synthesizer = self.build_synthesizer()
        # The weights are functions of noised releases, so whether they are finite is public.
        if not all(value.isfinite().all() for value in synthesizer.network.state_dict().values()):
            raise Failure(Fault.DIVERGED)
        return synthesizer

    def handed_on(self) -> dict[str, Tensor]:
        """What the next owner's training continues from, for methods that can be relayed."""
        raise NotImplementedError

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from what another owner's training handed on."""
        raise NotImplementedError

    def architecture(self, kind: Callable[..., A], **sizes: int) -> A:
        """A network architecture for images and classes of the declared schema."""
        schema = self.schema
        return kind(
            height=schema.height,
            width=schema.width,
            channels=schema.channels,
            classes=self.classes,
            **sizes,
        )

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Records by index. Labels outside the declared classes are clamped: an error would reveal them."""
        images, labels = self.records.take(indices)
        return images.to(self.device), labels.to(self.device).clamp(0, self.classes - 1)

    def take_finite(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """The same within [-1, 1], without records that have a pixel that is not finite."""
        images, labels = self.take(indices)
        finite = images.flatten(1).isfinite().all(1)
        return images[finite].clamp(-1, 1), labels[finite]

    def seeded(self) -> AbstractContextManager[None]:
        """Torch's global generator, seeded from the trainer's randomness: for initial weights."""
        return seeded(self.rng)


def recipe_of(plan: Plan, device: str) -> Any:
    """The plan's own recipe, or the preset of its method for the device."""
    recipe = getattr(plan, "known_recipe", None) or getattr(plan, "recipe", None)
    return recipe or plan.recipes.for_device(device)  # type: ignore[union-attr]


def require_images(schema: ImageSchema) -> ImageSchema:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return schema


@contextmanager
def seeded(rng: Rng) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed(rng))
        yield


def seed(rng: Rng) -> int:
    return int(rng.words(1)[0]) >> 1


def counter() -> Tensor:
    """A count that is part of a trainer's state."""
    return torch.zeros((), dtype=torch.int64)


def cosine_decay(step: int, steps: int) -> float:
    """The factor of a learning rate that falls along a cosine, to a hundredth."""
    return max((1 + math.cos(math.pi * step / steps)) / 2, 0.01)


# Checkpoints


def tensors_of(**parts: nn.Module | torch.optim.Optimizer | Tensor) -> dict[str, Tensor]:
    """Tensors of modules and optimizers, named by part, sharing their memory."""
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            tensors[name] = part
        elif isinstance(part, nn.Module):
            tensors |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        else:
            for index, parameter in enumerate(part.param_groups[0]["params"]):
                state = part.state.get(parameter, {})
                tensors |= {f"{name}.{index}.{key}": value for key, value in state.items()}
    return tensors


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def load_into(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    missing = set(state) - set(tensors)
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors")
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(tensors[name])
