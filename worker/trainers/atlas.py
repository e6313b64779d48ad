"""Atlas: sums over all records, noised one after the other, from which charts of every class are made."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.atlas import FURTHEST, Atlas, AtlasNetwork, Poses, each, on_grid
from sluice.generators.image import ImageSynthesizer
from sluice.methods.atlas import AtlasPlan, AtlasRecipe
from sluice.methods.base import trainable
from sluice.privacy.events import Composition, Query
from worker.mechanisms.clipping import ROOM
from worker.mechanisms.noise import GaussianNoise, Releases, Rng
from worker.mechanisms.sampling import EveryRecord
from worker.trainers.progress import Progress
from worker.trainers.swd import ImageRows, fill, kept

# Records held in memory at a time.
MANY = 512
# What the first sum is clipped to, as a share of the longest an image can be: nothing else is known yet.
FIRST_REACH = 0.6
# A group is taken for no smaller than this, whatever its noisy count says.
FEWEST = 20.0
# What a record adds is made of whole numbers of this, and squares of its square, so that sums over up to 2^23
# records are exact in float64: in any order, and whoever else is there.
STEP = 2.0**-15
# No record and no centre is taken for further away than this, in reaches of a chart, so that distances are
# exact too.
FAR = 16.0


def architecture(schema: ImageSchema, plan: AtlasPlan, recipe: AtlasRecipe) -> Atlas:
    if schema.kind != "image" or not trainable(schema.height, schema.width):
        raise Failure(Fault.SCHEMA_MISMATCH)
    return Atlas.fitting(
        height=schema.height,
        width=schema.width,
        channels=schema.channels,
        classes=len(schema.classes),
        frequencies=recipe.frequencies,
        axes=recipe.axes,
        charts=plan.charts,
    )


@dataclass(frozen=True)
class Noises:
    """The noise of every stage, one stage after the other."""

    stages: dict[str, GaussianNoise]

    @property
    def steps(self) -> int:
        return sum(noise.steps for noise in self.stages.values())

    def stage(self, step: int) -> str:
        """What the step of this number, counted from one, is for."""
        for name, noise in self.stages.items():
            if step <= noise.steps:
                return name
            step -= noise.steps
        raise Failure(Fault.ACCOUNTING_MISMATCH)

    def releases(self, rng: Rng, *, made: int = 0) -> "StagedReleases":
        parts, left = {}, made
        for name, noise in self.stages.items():
            parts[name] = noise.releases(rng, made=min(left, noise.steps))
            left -= parts[name].made
        return StagedReleases(self, parts)


@dataclass
class StagedReleases:
    """Counts what was released; each stage no oftener than planned."""

    noise: Noises
    parts: dict[str, Releases] = field(repr=False)

    @property
    def made(self) -> int:
        return sum(part.made for part in self.parts.values())

    def release(self, total: Tensor) -> Tensor:
        return self.parts[self.noise.stage(self.made + 1)].release(total)


@dataclass(repr=False)
class Seen:
    """Some records as the sums see them, each row from one record. Private."""

    vectors: Tensor
    labels: Tensor


class AtlasTraining:
    """Released sum by sum, each chosen after the last was understood.

    Guarantee: every step is a Gaussian release of a sum over all records, to which each record adds a vector
    of norm at most plan.bound(stage), whatever was released before; see docs/guarantees.md#atlas. What is
    made of the sums costs nothing. A checkpoint keeps what was made of them, so that none is released again.
    """

    def __init__(
        self,
        plan: AtlasPlan,
        records: ImageRows,
        *,
        rng: Rng,
        recipe: AtlasRecipe | None = None,
        device: str | None = None,
    ) -> None:
        # Always the processor: it takes seconds, and there sums are known to be exact.
        del device
        self.plan, self.records, self.rng = plan, records, rng
        self.recipe = recipe = recipe or plan.known_recipe
        self.shape = shape = architecture(records.schema, plan, recipe)
        self.cosines, self.poses = shape.cosines, shape.poses
        self.classes, self.charts, self.axes = shape.classes, shape.charts, shape.axes
        self.longest = FIRST_REACH * math.sqrt(math.prod(self.cosines.shape))

        size, axes, groups = shape.size, self.axes, self.classes * self.charts
        sizes = {
            "poses": self.classes * (size + 1),
            "means": self.classes * (size + 2),
            "spread": pairs(size),
            "centres": groups * (axes + 1),
            "shapes": groups * (1 + axes + pairs(axes)),
        }
        self.sampling = EveryRecord(steps=plan.known_steps)
        self.noise = Noises(
            {
                stage: GaussianNoise(stddev=plan.noise_stddev, size=sizes[stage], steps=steps)
                for stage, steps in plan.stages.items()
            }
        )
        self.bounds = {
            stage: noise.inner(plan.bound(stage)) * (1 - ROOM) for stage, noise in self.noise.stages.items()
        }
        # By which sums are multiplied once they are complete, so that a record has added no more than one.
        moments = torch.cat([torch.ones(1 + axes).double(), lengths(axes)])
        self.weights: dict[str, Tensor | float] = {
            "poses": 1 / math.sqrt(3),
            "means": 1 / math.sqrt(3),
            "spread": lengths(size),
            "centres": 1 / math.sqrt(2),
            "shapes": moments.repeat(groups) / math.sqrt(3),
        }
        events = tuple(
            EveryRecord(steps=noise.steps).event(
                query=Query.SUM, bound=plan.bound(stage), noise_stddev=noise.stddev
            )
            for stage, noise in self.noise.stages.items()
        )
        if Composition(events=events) != plan.event():
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        self.draws = self.sampling.batches(records)
        self.releases = self.noise.releases(rng)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float64)

        # What is known so far: noised sums, what was made of them, and nothing else.
        self.known = {
            "poses": zeros(self.classes, Poses.size),
            "posed": zeros(),
            "counts": zeros(self.classes),
            "means": zeros(self.classes, size),
            "reach": zeros(),
            "directions": zeros(size, size),
            "spreads": zeros(size),
            "centres": zeros(self.classes, self.charts, axes),
            "weights": zeros(self.classes, self.charts),
            "factors": zeros(self.classes, self.charts, axes, axes),
        }

    def steps(self) -> Iterator[Progress]:
        for everyone in self.draws:
            stage = self.noise.stage(self.draws.drawn)
            total, bound = self.total(stage, everyone), self.bounds[stage]
            noisy = self.releases.release(total * (self.weights[stage] * bound)) / bound
            getattr(self, f"learn_{stage}")(noisy, self.plan.noise_stddev / bound)
            yield Progress(self.draws.drawn, self.plan.known_steps)

    def total(self, stage: str, everyone: np.ndarray) -> Tensor:
        """The sum over records, before its weights.

        Guarantee: what a record adds is a function of that record and of what is known, and the sum is exact:
        without one record it is smaller by what that one adds, to the last bit.
        """
        total = torch.zeros(self.noise.stages[stage].size, dtype=torch.float64)
        for part in self.seen(everyone, first=stage == "poses"):
            getattr(self, f"add_{stage}")(total, part)
        return total

    def seen(self, everyone: np.ndarray, *, first: bool) -> Iterator[Seen]:
        """What the sums need of the records, a part at a time. One that is not finite adds nothing to any."""
        for start in range(0, len(everyone), MANY):
            images, labels = self.records.take(everyone[start : start + MANY])
            finite = images.flatten(1).isfinite().all(1)
            # A label outside the declared classes must not stop the training: stopping would tell of it.
            images, labels = images[finite].clamp(-1, 1), labels[finite].clamp(0, self.classes - 1)
            yield Seen(self.coordinates((images + 1) / 2, labels, first=first), labels)

    def coordinates(self, images: Tensor, labels: Tensor, *, first: bool) -> Tensor:
        """Cosines and pose as they are and, later, of images set upright, and how far that was."""
        poses = self.poses.of(images)
        if not first:
            usual = self.known["poses"][labels]
            far = ((poses - usual) * self.known["posed"]).clamp(-FURTHEST, FURTHEST)
            images, poses = self.poses.moved(images, usual + far, usual), far
        return on_grid(torch.cat([self.cosines.of(images), poses * self.poses.weights], 1))

    # Poses: how images of a class mostly stand, and whether they stand free

    def add_poses(self, total: Tensor, seen: Seen) -> None:
        shown, poses = (seen.vectors / self.longest).tensor_split([self.cosines.size], 1)
        ones = torch.ones(len(seen.labels), 1, dtype=torch.float64)
        rows = torch.cat([ones, clipped(shown), clipped(poses)], 1)
        total.view(self.classes, -1).index_add_(0, seen.labels, rows)

    def learn_poses(self, noisy: Tensor, noise: float) -> None:
        del noise
        sums = noisy.view(self.classes, -1) * math.sqrt(3)
        means = sums[:, 1:] * self.longest / sums[:, :1].clamp(min=FEWEST)
        shown, poses = means.tensor_split([self.cosines.size], 1)
        pixels = self.cosines.pixels(shown.float()).mean((0, 1))
        edge = torch.cat([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]]).mean()
        # What fills its frame would lose what is moved out of it.
        free = edge <= self.recipe.edge * pixels.mean().clamp(min=1e-3)
        self.known["poses"] = (poses / self.poses.weights).clamp(-FURTHEST, FURTHEST)
        self.known["posed"] = free.double()

    # Means: how many are in a class, where, and how far from nothing

    def add_means(self, total: Tensor, seen: Seen) -> None:
        rows = clipped(seen.vectors / self.longest)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype)
        rows = torch.cat([ones, rows, rows.square().sum(1, keepdim=True)], 1)
        total.view(self.classes, -1).index_add_(0, seen.labels, rows)

    def learn_means(self, noisy: Tensor, noise: float) -> None:
        del noise
        sums = noisy.view(self.classes, -1) * math.sqrt(3)
        counts = sums[:, 0].clamp(min=FEWEST)
        means = sums[:, 1:-1] * self.longest / counts[:, None]
        squares = sums[:, -1] * self.longest**2 / counts
        around = (counts * (squares - means.square().sum(1))).sum() / counts.sum()
        reach = self.recipe.reach * around.clamp(min=(0.01 * self.longest) ** 2).sqrt()
        # No mean of clipped vectors is longer; and what is apart from it is not too long to be exact.
        means = means * (self.longest / means.norm(dim=1, keepdim=True)).clamp(max=1)
        self.known |= {"counts": counts, "means": means, "reach": reach}

    # Spread: the directions in which records differ from the mean of their class

    def apart(self, seen: Seen) -> Tensor:
        """How far records are from the mean of their class."""
        return seen.vectors - on_grid(self.known["means"])[seen.labels]

    def add_spread(self, total: Tensor, seen: Seen) -> None:
        rows = clipped(self.apart(seen) / self.known["reach"])
        total += packed(rows.T @ rows)

    def learn_spread(self, noisy: Tensor, noise: float) -> None:
        share = self.known["reach"].square() / self.known["counts"].sum()
        squares, directions = torch.linalg.eigh(unpacked(noisy, self.shape.size) * share)
        squares, directions = squares.flip(0), directions.flip(1)
        # Noise alone would reach up to its edge: what lies far below it is not told apart any more.
        edge = noise * math.sqrt(2 * len(squares)) * share
        least = torch.maximum(edge / 2, 1e-3 * squares[0].clamp(min=1e-6))
        squares[: self.axes] = torch.maximum(squares[: self.axes], least)
        # Beyond the axes, what is within noise is made equal: noise adds nothing on average.
        drowned = (squares <= edge) & (torch.arange(len(squares)) >= self.axes)
        squares[drowned] = squares[drowned].mean() if drowned.any() else 0.0
        self.known |= {"directions": directions, "spreads": squares.clamp(min=0).sqrt()}
        start = self.rng.normals(self.known["centres"].numel()).view_as(self.known["centres"])
        self.known["centres"] = 0.7 * start * self.kept_spreads * (self.charts > 1)

    @property
    def scales(self) -> Tensor:
        """By what each axis is divided, so that wide ones do not drown the others."""
        return self.known["spreads"][: self.axes] ** self.recipe.whitening

    @property
    def kept_spreads(self) -> Tensor:
        return self.known["spreads"][: self.axes] / self.scales

    @property
    def chart_reach(self) -> Tensor:
        return self.recipe.reach * self.kept_spreads.square().sum().sqrt()

    @property
    def laid(self) -> Tensor:
        """Where the centres of charts are along the axes, in reaches."""
        return on_grid(self.known["centres"] / self.chart_reach, STEP).clamp(-FAR, FAR)

    def along(self, seen: Seen) -> Tensor:
        """Where records are along the axes, exactly: they are less than 2^10 apart from their mean."""
        return self.apart(seen) @ on_grid(self.known["directions"][:, : self.axes])

    def places(self, seen: Seen) -> Tensor:
        """The same in reaches of a chart."""
        return on_grid(self.along(seen) / (self.scales * self.chart_reach), STEP).clamp(-FAR, FAR)

    def chart_of(self, places: Tensor, labels: Tensor) -> Tensor:
        """The nearest chart of the class, numbered through all classes; of two as near, the first."""
        centres = self.laid
        far = centres.square().sum(2)[labels]
        for label in range(self.classes):
            chosen = labels == label
            far[chosen] -= 2 * places[chosen] @ centres[label].T
        return labels * self.charts + far.argmin(1)

    # Centres: rounds of Lloyd

    def add_centres(self, total: Tensor, seen: Seen) -> None:
        places = self.places(seen)
        charts = self.chart_of(places, seen.labels)
        rows = torch.cat([torch.ones(len(places), 1, dtype=places.dtype), clipped(places)], 1)
        total.view(-1, self.axes + 1).index_add_(0, charts, rows)

    def learn_centres(self, noisy: Tensor, noise: float) -> None:
        sums = noisy.view(self.classes, self.charts, -1) * math.sqrt(2)
        counts = sums[..., :1].clamp(min=2 * math.sqrt(2) * noise + 1)
        self.known["centres"] = sums[..., 1:] * self.chart_reach / counts

    # Shapes: how many are on a chart, and the first two moments around its centre

    def add_shapes(self, total: Tensor, seen: Seen) -> None:
        places = self.places(seen)
        charts = self.chart_of(places, seen.labels)
        rows = clipped(places - self.laid.flatten(0, 1)[charts])
        sums = total.view(self.classes * self.charts, -1)
        for chart in charts.unique():
            some = rows[charts == chart]
            sums[chart, 0] += len(some)
            sums[chart, 1 : self.axes + 1] += some.sum(0)
            sums[chart, self.axes + 1 :] += packed(some.T @ some)

    def learn_shapes(self, noisy: Tensor, noise: float) -> None:
        noise, axes = noise * math.sqrt(3), self.axes
        sums = noisy.view(self.classes, self.charts, -1) * math.sqrt(3)
        counts = sums[..., 0].clamp(min=FEWEST)
        weights = sums[..., 0].clamp(min=0) + 1e-9
        weights = weights / weights.sum(1, keepdim=True)
        shifts = sums[..., 1 : axes + 1] / counts[..., None]
        shifts = shrunk(shifts, torch.zeros_like(shifts), (noise / counts).square() * axes, dims=1)
        squares = unpacked(sums[..., axes + 1 :], axes) / counts[..., None, None]
        squares = squares - shifts[..., :, None] * shifts[..., None, :]
        # A chart's own shape is kept as far as it is more than noise, and so is that of its class.
        of_class = (weights[..., None, None] * squares).sum(1)
        off = (noise / counts).square() * pairs(axes)
        squares = shrunk(squares, of_class[:, None].expand_as(squares), off, dims=2)
        values, vectors = torch.linalg.eigh(squares)
        factors = vectors * values.clamp(min=0).sqrt()[..., None, :]
        reach = self.chart_reach * self.scales
        self.known |= {
            "weights": weights,
            "centres": self.known["centres"] * self.scales + shifts * reach,
            "factors": factors * reach[:, None],
        }

    def checkpoint(self) -> dict[str, Tensor]:
        return kept({"step": torch.tensor(self.draws.drawn), **self.known})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on where the checkpoint was taken. What was released stays; only what is left is drawn."""
        fill(self.known, tensors)
        step = int(tensors["step"])
        self.draws = self.sampling.batches(self.records, drawn=step)
        self.releases = self.noise.releases(self.rng, made=step)

    def diagnostics(self) -> dict[str, float]:
        return {}

    def synthesizer(self) -> ImageSynthesizer:
        if not self.draws.drawn == self.releases.made == self.plan.known_steps:
            raise Failure(Fault.ACCOUNTING_MISMATCH)
        network, known = AtlasNetwork(self.shape), self.known
        names = ("poses", "means", "directions", "weights", "centres", "factors")
        found = {name: known[name].clone() for name in names} | {"strays": known["spreads"][self.axes :]}
        # Images that were not set upright are not turned either: what is there is noise.
        found["means"][:, self.cosines.size :] *= known["posed"]
        found["directions"][self.cosines.size :] *= known["posed"]
        # A function of noised sums, so that it may be known.
        if not all(value.isfinite().all() for value in found.values()):
            raise Failure(Fault.DIVERGED)
        network.load_state_dict(found)
        return ImageSynthesizer(self.shape, network)


def pairs(size: int) -> int:
    return size * (size + 1) // 2


def clipped(rows: Tensor) -> Tensor:
    """Rows in whole steps, scaled down to norm one where they are longer.

    Guarantee: every row is a function of what came in as that row, to the last bit, and no longer than one
    but for rounding in the sixteenth digit. One that is not finite becomes zero.
    """
    largest = rows.abs().amax(1, keepdim=True)
    rows, largest = (torch.where(largest.isfinite(), numbers, 0) for numbers in (rows, largest))
    # In steps of the largest, squares are whole numbers and their sum is exact.
    scaled = (rows / largest.clamp(min=torch.finfo(rows.dtype).tiny) / STEP).round_()
    length = each(math.sqrt, scaled.square().sum(1, keepdim=True)) * STEP
    # Rounding to steps makes a row longer by no more than this.
    longest = 1 - STEP / 2 * math.sqrt(rows.shape[1])
    return (scaled * torch.minimum(largest, longest / length.clamp(min=1))).round_() * STEP


def packed(square: Tensor) -> Tensor:
    """The upper half of a symmetric matrix; `lengths` make it a vector of the same length."""
    row, column = torch.triu_indices(*square.shape)
    return square[row, column]


def lengths(size: int) -> Tensor:
    row, column = torch.triu_indices(size, size)
    return torch.where(row == column, 1.0, math.sqrt(2)).double()


def unpacked(vectors: Tensor, size: int) -> Tensor:
    """The symmetric matrices that were packed, and weighted by `lengths`."""
    row, column = torch.triu_indices(size, size)
    out = vectors.new_zeros(*vectors.shape[:-1], size, size)
    out[..., row, column] = vectors / lengths(size)
    return out + out.triu(1).transpose(-1, -2)


def shrunk(found: Tensor, towards: Tensor, off: Tensor, *, dims: int) -> Tensor:
    """James and Stein: what is found, pulled `towards` by as much as noise is likely to have put it `off`."""
    apart = found - towards
    kept = (1 - off / apart.flatten(-dims).square().sum(-1).clamp(min=1e-30)).clamp(min=0)
    return towards + kept[(..., *[None] * dims)] * apart
