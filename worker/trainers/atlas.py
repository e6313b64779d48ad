"""Atlas: noised sums over all records, one after the other, from which charts of every class are made."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice.generators.atlas import FURTHEST, Atlas, AtlasNetwork, Poses, elementwise, on_grid
from sluice.generators.image import ImageSynthesizer
from sluice.methods.atlas import AtlasPlan, AtlasRecipe
from sluice.privacy.events import Query
from worker.mechanisms.clipping import ROOM
from worker.mechanisms.mechanism import Mechanism, StagedMechanism
from worker.mechanisms.noise import GaussianNoise
from worker.mechanisms.sampling import EveryRecord
from worker.trainers.base import BaseTrainer

# Records held in memory at a time.
CHUNK = 512
# What the first sums are clipped to, as a share of the largest norm of an image: the best bound so far.
FIRST_REACH = 0.6
# The least size assumed of a group, for any noisy count.
LEAST_COUNT = 20.0
# Contributions are quantised to multiples of this, and products to its square, so that sums over up to 2^23
# records are exact in float64 and independent of order and of other records.
STEP = 2.0**-15
# Coordinates and centres are clamped to this, in units of a chart's reach, so that distances are exact too.
FAR = 16.0


@dataclass(repr=False)
class RecordBatch:
    """Some records as the sums use them, one row each. Private."""

    vectors: Tensor
    labels: Tensor


class Trainer(BaseTrainer[AtlasPlan, AtlasRecipe]):
    """Five stages of sums, each defined by the releases before it.

    Guarantee: every step is a Gaussian release of a sum over all records, to which each record adds a vector
    of norm at most plan.bound(stage), for any earlier releases; see docs/guarantees.md#atlas. Computing with
    the sums costs nothing. A checkpoint includes it, so that no sum is released again.
    """

    on_cpu = True  # it takes seconds, and sums are known to be exact there
    mechanism: StagedMechanism

    def build(self) -> None:
        recipe, charts = self.recipe, self.plan.charts
        self.shape = shape = self.architecture(
            Atlas.fitting, frequencies=recipe.frequencies, axes=recipe.axes, charts=charts
        )
        self.cosines, self.poses = shape.cosines, shape.poses
        self.charts, self.axes, size, axes = charts, shape.axes, shape.size, shape.axes
        self.longest = FIRST_REACH * math.sqrt(math.prod(self.cosines.shape))
        # The factors that make a complete sum one to which each record added a vector of norm at most one.
        moments = torch.cat([torch.ones(1 + axes).double(), packing_weights(axes)])
        self.weights: dict[str, Tensor] = {
            "poses": torch.ones(self.classes * (size + 1)).double() / math.sqrt(3),
            "means": torch.ones(self.classes * (size + 2)).double() / math.sqrt(3),
            "spread": packing_weights(size),
            "centres": torch.ones(self.classes * charts * (axes + 1)).double() / math.sqrt(2),
            "shapes": moments.repeat(self.classes * charts) / math.sqrt(3),
        }
        self.stages: dict[
            str, tuple[Callable[[Tensor, RecordBatch], None], Callable[[Tensor, float], None]]
        ] = {
            "poses": (self.add_poses, self.learn_poses),
            "means": (self.add_means, self.learn_means),
            "spread": (self.add_spread, self.learn_spread),
            "centres": (self.add_centres, self.learn_centres),
            "shapes": (self.add_shapes, self.learn_shapes),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "poses": (self.classes, Poses.size),
            "posed": (),
            "counts": (self.classes,),
            "means": (self.classes, size),
            "reach": (),
            "directions": (size, size),
            "spreads": (size,),
            "centres": (self.classes, charts, axes),
            "weights": (self.classes, charts),
            "factors": (self.classes, charts, axes, axes),
        }
        # What was learned so far, from noised sums alone.
        self.learned = {name: torch.zeros(sizes).double() for name, sizes in shapes.items()}

    def make_mechanism(self) -> StagedMechanism:
        def stage(name: str, steps: int) -> Mechanism:
            noise = GaussianNoise(stddev=self.plan.noise_stddev, size=len(self.weights[name]))
            bound = self.plan.bound(name)
            return Mechanism(EveryRecord(steps=steps), noise, self.rng, query=Query.SUM, bound=bound)

        return StagedMechanism({name: stage(name, steps) for name, steps in self.plan.stages.items()})

    def step(self, batch: np.ndarray) -> None:
        stage = self.mechanism.stage
        bound = self.mechanism.stages[stage].clip_norm * (1 - ROOM)
        noisy = self.mechanism.release(self.total(stage, batch) * (self.weights[stage] * bound)) / bound
        _, learn = self.stages[stage]
        learn(noisy, self.plan.noise_stddev / bound)

    def total(self, stage: str, indices: np.ndarray) -> Tensor:
        """The sum over records, before its weights.

        Guarantee: what a record adds is a function of that record and of earlier releases, and the sum is
        exact: without a record it is smaller by exactly what that record adds.
        """
        total, (add, _) = torch.zeros_like(self.weights[stage]), self.stages[stage]
        for batch in self.batches(indices, upright=stage != "poses"):
            add(total, batch)
        return total

    def batches(self, indices: np.ndarray, *, upright: bool) -> Iterator[RecordBatch]:
        for start in range(0, len(indices), CHUNK):
            images, labels = self.take_finite(indices[start : start + CHUNK])
            yield RecordBatch(self.coordinates((images + 1) / 2, labels, upright=upright), labels)

    def coordinates(self, images: Tensor, labels: Tensor, *, upright: bool) -> Tensor:
        """Cosines and pose; `upright` moves images to the usual pose of their class first."""
        poses = self.poses.of(images)
        if upright:
            usual = self.learned["poses"][labels]
            offset = ((poses - usual) * self.learned["posed"]).clamp(-FURTHEST, FURTHEST)
            images, poses = self.poses.moved(images, usual + offset, usual), offset
        return on_grid(torch.cat([self.cosines.of(images), poses * self.poses.weights], 1))

    # Poses: the usual pose of a class, and whether images have a free edge

    def add_poses(self, total: Tensor, batch: RecordBatch) -> None:
        image, poses = (batch.vectors / self.longest).tensor_split([self.cosines.size], 1)
        rows = torch.cat([ones(image), clip_exactly(image), clip_exactly(poses)], 1)
        total.view(self.classes, -1).index_add_(0, batch.labels, rows)

    def learn_poses(self, noisy: Tensor, noise: float) -> None:
        del noise
        sums = noisy.view(self.classes, -1) * math.sqrt(3)
        means = sums[:, 1:] * self.longest / sums[:, :1].clamp(min=LEAST_COUNT)
        image, poses = means.tensor_split([self.cosines.size], 1)
        pixels = self.cosines.pixels(image.float()).mean((0, 1))
        edge = torch.cat([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]]).mean()
        # Images that fill their frame would lose what is moved out of it.
        free = edge <= self.recipe.edge * pixels.mean().clamp(min=1e-3)
        self.learned["poses"] = (poses / self.poses.weights).clamp(-FURTHEST, FURTHEST)
        self.learned["posed"] = free.double()

    # Means: the size of a class, its mean, and the mean squared norm

    def add_means(self, total: Tensor, batch: RecordBatch) -> None:
        rows = clip_exactly(batch.vectors / self.longest)
        rows = torch.cat([ones(rows), rows, rows.square().sum(1, keepdim=True)], 1)
        total.view(self.classes, -1).index_add_(0, batch.labels, rows)

    def learn_means(self, noisy: Tensor, noise: float) -> None:
        del noise
        sums = noisy.view(self.classes, -1) * math.sqrt(3)
        counts = sums[:, 0].clamp(min=LEAST_COUNT)
        means = sums[:, 1:-1] * self.longest / counts[:, None]
        squares = sums[:, -1] * self.longest**2 / counts
        variance = (counts * (squares - means.square().sum(1))).sum() / counts.sum()
        reach = self.recipe.reach * variance.clamp(min=(0.01 * self.longest) ** 2).sqrt()
        # No mean of clipped vectors is longer; and deviations from it stay short enough to be exact.
        means = means * (self.longest / means.norm(dim=1, keepdim=True)).clamp(max=1)
        self.learned |= {"counts": counts, "means": means, "reach": reach}

    # Spread: the directions in which records deviate from the mean of their class

    def deviations(self, batch: RecordBatch) -> Tensor:
        return batch.vectors - on_grid(self.learned["means"])[batch.labels]

    def add_spread(self, total: Tensor, batch: RecordBatch) -> None:
        rows = clip_exactly(self.deviations(batch) / self.learned["reach"])
        total += packed(rows.T @ rows)

    def learn_spread(self, noisy: Tensor, noise: float) -> None:
        share = self.learned["reach"].square() / self.learned["counts"].sum()
        squares, directions = torch.linalg.eigh(unpacked(noisy, self.shape.size) * share)
        squares, directions = squares.flip(0), directions.flip(1)
        # The largest eigenvalue that noise alone would have: values far below it mean nothing.
        edge = noise * math.sqrt(2 * len(squares)) * share
        least = torch.maximum(edge / 2, 1e-3 * squares[0].clamp(min=1e-6))
        squares[: self.axes] = torch.maximum(squares[: self.axes], least)
        # Beyond the axes, values within noise are replaced by their mean: noise is zero on average.
        within_noise = (squares <= edge) & (torch.arange(len(squares)) >= self.axes)
        squares[within_noise] = squares[within_noise].mean() if within_noise.any() else 0.0
        self.learned |= {"directions": directions, "spreads": squares.clamp(min=0).sqrt()}
        start = self.rng.normals(self.learned["centres"].numel()).view_as(self.learned["centres"])
        self.learned["centres"] = 0.7 * start * self.scaled_spreads * (self.charts > 1)

    @property
    def scales(self) -> Tensor:
        """The divisor of each axis, so that wide axes do not dominate distances."""
        return self.learned["spreads"][: self.axes] ** self.recipe.whitening

    @property
    def scaled_spreads(self) -> Tensor:
        return self.learned["spreads"][: self.axes] / self.scales

    @property
    def chart_reach(self) -> Tensor:
        return self.recipe.reach * self.scaled_spreads.square().sum().sqrt()

    @property
    def chart_centres(self) -> Tensor:
        """The centres of charts along the axes, in units of the reach."""
        return on_grid(self.learned["centres"] / self.chart_reach, STEP).clamp(-FAR, FAR)

    def axis_coordinates(self, batch: RecordBatch) -> Tensor:
        """Coordinates of records along the axes: exact, as deviations are shorter than 2^10."""
        return self.deviations(batch) @ on_grid(self.learned["directions"][:, : self.axes])

    def chart_coordinates(self, batch: RecordBatch) -> Tensor:
        """The same in units of a chart's reach."""
        scaled = self.axis_coordinates(batch) / (self.scales * self.chart_reach)
        return on_grid(scaled, STEP).clamp(-FAR, FAR)

    def nearest_chart(self, coordinates: Tensor, labels: Tensor) -> Tensor:
        """The nearest chart of the class, numbered through all classes; of equally near ones the first."""
        centres = self.chart_centres
        distances = centres.square().sum(2)[labels]
        for label in range(self.classes):
            chosen = labels == label
            distances[chosen] -= 2 * coordinates[chosen] @ centres[label].T
        return labels * self.charts + distances.argmin(1)

    # Centres: rounds of Lloyd's algorithm

    def add_centres(self, total: Tensor, batch: RecordBatch) -> None:
        coordinates = self.chart_coordinates(batch)
        rows = torch.cat([ones(coordinates), clip_exactly(coordinates)], 1)
        total.view(-1, self.axes + 1).index_add_(0, self.nearest_chart(coordinates, batch.labels), rows)

    def learn_centres(self, noisy: Tensor, noise: float) -> None:
        sums = noisy.view(self.classes, self.charts, -1) * math.sqrt(2)
        counts = sums[..., :1].clamp(min=2 * math.sqrt(2) * noise + 1)
        self.learned["centres"] = sums[..., 1:] * self.chart_reach / counts

    # Shapes: the size of a chart, and the first two moments around its centre

    def add_shapes(self, total: Tensor, batch: RecordBatch) -> None:
        coordinates = self.chart_coordinates(batch)
        charts = self.nearest_chart(coordinates, batch.labels)
        rows = clip_exactly(coordinates - self.chart_centres.flatten(0, 1)[charts])
        sums = total.view(self.classes * self.charts, -1)
        for chart in charts.unique():
            members = rows[charts == chart]
            sums[chart, 0] += len(members)
            sums[chart, 1 : self.axes + 1] += members.sum(0)
            sums[chart, self.axes + 1 :] += packed(members.T @ members)

    def learn_shapes(self, noisy: Tensor, noise: float) -> None:
        noise, axes = noise * math.sqrt(3), self.axes
        sums = noisy.view(self.classes, self.charts, -1) * math.sqrt(3)
        counts = sums[..., 0].clamp(min=LEAST_COUNT)
        weights = sums[..., 0].clamp(min=0) + 1e-9
        weights = weights / weights.sum(1, keepdim=True)
        shifts = sums[..., 1 : axes + 1] / counts[..., None]
        shifts = shrink(shifts, torch.zeros_like(shifts), (noise / counts).square() * axes, dims=1)
        squares = unpacked(sums[..., axes + 1 :], axes) / counts[..., None, None]
        squares = squares - shifts[..., :, None] * shifts[..., None, :]
        # A chart's own shape is used as far as it exceeds the noise; the rest is that of its class.
        of_class = (weights[..., None, None] * squares).sum(1)
        error = (noise / counts).square() * triangle(axes)
        squares = shrink(squares, of_class[:, None].expand_as(squares), error, dims=2)
        values, vectors = torch.linalg.eigh(squares)
        factors = vectors * values.clamp(min=0).sqrt()[..., None, :]
        reach = self.chart_reach * self.scales
        self.learned |= {
            "weights": weights,
            "centres": self.learned["centres"] * self.scales + shifts * reach,
            "factors": factors * reach[:, None],
        }

    def state(self) -> dict[str, Tensor]:
        return self.learned

    def build_synthesizer(self) -> ImageSynthesizer:
        names = ("poses", "means", "directions", "weights", "centres", "factors")
        weights = {name: self.learned[name].clone() for name in names}
        weights["strays"] = self.learned["spreads"][self.axes :]
        # Images that were not moved upright get no pose either: the numbers there are noise.
        weights["means"][:, self.cosines.size :] *= self.learned["posed"]
        weights["directions"][self.cosines.size :] *= self.learned["posed"]
        network = AtlasNetwork(self.shape)
        network.load_state_dict(weights)
        return ImageSynthesizer(self.shape, network)


def ones(rows: Tensor) -> Tensor:
    return rows.new_ones(len(rows), 1)


def triangle(size: int) -> int:
    return size * (size + 1) // 2


def clip_exactly(rows: Tensor) -> Tensor:
    """Rows in multiples of STEP, scaled down to norm one where they are longer.

    Guarantee: every row of the result is a function of the same row of the input, to the last bit, with norm
    at most one except for rounding in the sixteenth digit. A row that is not finite becomes zero.
    """
    largest = rows.abs().amax(1, keepdim=True)
    rows, largest = (torch.where(largest.isfinite(), numbers, 0) for numbers in (rows, largest))
    # In steps of the largest entry, squares are integers and their sum is exact.
    scaled = (rows / largest.clamp(min=torch.finfo(rows.dtype).tiny) / STEP).round_()
    length = elementwise(math.sqrt, scaled.square().sum(1, keepdim=True)) * STEP
    # Rounding to steps makes a row longer by no more than this.
    longest = 1 - STEP / 2 * math.sqrt(rows.shape[1])
    return (scaled * torch.minimum(largest, longest / length.clamp(min=1))).round_() * STEP


def packed(square: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix; times `packing_weights` it has the norm of the matrix."""
    row, column = torch.triu_indices(*square.shape)
    return square[row, column]


def packing_weights(size: int) -> Tensor:
    row, column = torch.triu_indices(size, size)
    return torch.where(row == column, 1.0, math.sqrt(2)).double()


def unpacked(vectors: Tensor, size: int) -> Tensor:
    """The symmetric matrices of packed vectors with their `packing_weights`."""
    row, column = torch.triu_indices(size, size)
    out = vectors.new_zeros(*vectors.shape[:-1], size, size)
    out[..., row, column] = vectors / packing_weights(size)
    return out + out.triu(1).transpose(-1, -2)


def shrink(estimate: Tensor, target: Tensor, error: Tensor, *, dims: int) -> Tensor:
    """James-Stein: moves an estimate towards a target, by the squared error that noise is likely to have."""
    gap = estimate - target
    share = (1 - error / gap.flatten(-dims).square().sum(-1).clamp(min=1e-30)).clamp(min=0)
    return target + share[(..., *[None] * dims)] * gap
