"""How each mechanism learns. One file per trainer: its recipe, its loss, its loop.

A trainer is built from a plan (what it costs), records, randomness and a recipe (how it learns; the one for
the device if none is given), and then followed:

    training = TRAINERS[plan.kind](plan, records, rng=SecureRng(), recipe=recipe, device="cpu")
    training.restore(tensors)                  # only when continuing from a checkpoint
    for progress in training.steps():          # one logical step each; stop asking to cancel
        ...                                    # heartbeat, training.checkpoint(), training.diagnostics()
    synthesizer = training.synthesizer()       # refuses unless every planned step was taken, exactly once

An adaptation has public records too, `source=`, and ends with a classifier.

A trainer knows no bucket, row or queue. It ends early only with a `Failure`, and none that depends on records
other than through their noised sums.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from sluice.generators.classifier import Classifier
from sluice.generators.image import ImageSynthesizer
from worker.trainers.adapt import AdaptTraining
from worker.trainers.atlas import AtlasTraining
from worker.trainers.dpgan import DPGANTraining
from worker.trainers.gswgan import GSWGANTraining
from worker.trainers.progress import Progress
from worker.trainers.sinkhorn import SinkhornTraining
from worker.trainers.swd import SWDTraining
from worker.trainers.swd_one_shot import SWDOneShotTraining


class Training(Protocol):
    def steps(self) -> Iterator[Progress]:
        """Takes the steps that are left, and says after each how many were taken. Nothing else is said."""
        ...

    def checkpoint(self) -> dict[str, Tensor]:
        """All that is needed to go on, but no randomness: who continues draws afresh. For the vault."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...

    def diagnostics(self) -> dict[str, float]:
        """How the last step went. Facts about records: for the curator, in the vault."""
        ...

    def synthesizer(self) -> ImageSynthesizer | Classifier: ...


TRAINERS = {
    "adapt": AdaptTraining,
    "atlas": AtlasTraining,
    "dpgan": DPGANTraining,
    "gswgan": GSWGANTraining,
    "sinkhorn": SinkhornTraining,
    "swd": SWDTraining,
    "swd_one_shot": SWDOneShotTraining,
}
