"""DPGAN follows its paper, and records reach it through noised sums alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.faults import Failure, Fault
from core.schema import ImageSchema
from sluice.generators.architecture import UnfitSynthesizer
from sluice.generators.dcgan import DCGAN, Generator
from sluice.generators.dense import Dense
from sluice.generators.image import ARCHITECTURE, WEIGHTS, ImageSynthesizer
from sluice.methods.dpgan import DPGANPlan, DPGANRecipe
from sluice.privacy.problems import InvalidPlan
from tests.fakes import FixedSampler, ImageRows, SeededRng
from worker.mechanisms.clipping import clip_rows, record_gradients
from worker.mechanisms.noise import SecureRng
from worker.trainers.dpgan import LADDER, StepSchedule, adversarial_loss, labelled_loss
from worker.trainers.dpgan import Trainer as DPGANTrainer
from worker.trainers.networks import BatchNormed, DenseDiscriminator, Discriminator, diversity

SMALL = DPGANRecipe(discriminator_features=16, generator_features=16, latent=4, physical_batch=8)
DENSE = replace(SMALL, network="dense", label_weight=0.5, discriminator_decay=0.1, variety=0.5)


class Rows(ImageRows):
    schema = ImageSchema(height=8, width=8, channels=1, classes=("a", "b", "c"))


def plan(**changes: object) -> DPGANPlan:
    given = {"steps": 6, "noise_multiplier": 1.0, "sampling_prob": 0.2, "expected_batch": 10.0}
    return DPGANPlan(**given | changes)


def training(records: Rows | None = None, *, seed: int = 0, recipe: DPGANRecipe = SMALL, **changes: object):
    rows = records if records is not None else Rows.random(50)
    return DPGANTrainer(plan(**changes), rows, rng=SeededRng(seed), recipe=recipe, device="cpu")


# The networks of the paper


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("side", "channels", "classes", "discriminator", "generator"),
    [(28, 1, 10, 1.72e6, 2.27e6), (32, 3, 2, 2.64e6, 3.16e6)],
)
def test_the_pair_has_the_sizes_of_the_paper(side, channels, classes, discriminator, generator):
    shape = DCGAN(height=side, width=side, channels=channels, classes=classes)
    assert round(weights(Discriminator(shape, 128)) / 1e4) == pytest.approx(discriminator / 1e4, abs=0.6)
    assert round(weights(Generator(shape)) / 1e4) == pytest.approx(generator / 1e4, abs=0.6)


@pytest.mark.parametrize("size", [(28, 28, 1), (32, 32, 3), (8, 8, 1), (9, 14, 3), (8, 64, 1), (64, 64, 3)])
def test_the_discriminator_is_the_convolutional_one(size):
    """Patches times weights is convolving; looking a label up is convolving its planes."""
    height, width, channels = size
    shape = DCGAN(height=height, width=width, channels=channels, classes=3)
    ours = Discriminator(shape, 16)
    images, labels = torch.rand(4, channels, height, width) * 2 - 1, torch.tensor([0, 2, 1, 1])

    def convolved(layer: torch.nn.Linear, x: Tensor, kernel: tuple[int, int], **how: int) -> Tensor:
        return F.conv2d(x, layer.weight.unflatten(1, (*kernel, -1)).permute(0, 3, 1, 2), layer.bias, **how)

    def kernel(size: tuple[int, int]) -> tuple[int, int]:
        return (3 if size[0] % 2 else 4, 3 if size[1] % 2 else 4)

    planes = F.one_hot(labels, 3).float()[:, :, None, None].expand(-1, -1, height, width)
    how = {"stride": 2, "padding": 1}
    x = torch.cat(
        [
            convolved(ours.image, images, kernel((height, width)), **how),
            F.conv2d(planes, ours.label.weight, ours.label.bias, **how),
        ],
        1,
    )
    for layer in ours.body:
        x = convolved(layer, F.leaky_relu(x, 0.2), kernel(tuple(x.shape[2:])), **how)
    scores = convolved(ours.score, F.leaky_relu(x, 0.2), tuple(x.shape[2:])).flatten()
    assert torch.allclose(ours(images, labels), scores, atol=1e-6)
    assert scores.shape == (4,)


@pytest.mark.parametrize("size", [(28, 28, 1), (9, 14, 3), (64, 64, 3), (8, 8, 1)])
def test_the_generator_is_the_transposed_convolutional_one(size):
    height, width, channels = size
    made = Generator(DCGAN(height=height, width=width, channels=channels, classes=3, features=16, latent=5))
    latents, labels = torch.randn(4, 5), torch.tensor([0, 2, 1, 1])
    marks = F.one_hot(labels, 3).float()
    x = torch.cat([made.seed(latents[..., None, None]), made.label(marks[..., None, None])], 1)
    for layer in made.body:
        x = layer(F.leaky_relu(x, 0.2))
    found = made(latents, labels)
    assert found.shape == (4, channels, height, width)
    assert torch.allclose(found, torch.tanh(x), atol=1e-6)
    # and its gradients too
    ways = [
        torch.autograd.grad(out.square().sum(), list(made.parameters()))
        for out in (made(latents, labels), torch.tanh(x))
    ]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*ways, strict=True))


# The dense pair


def dense_generator() -> BatchNormed:
    torch.manual_seed(4)
    made = BatchNormed(Dense(height=9, width=8, channels=3, classes=4, features=16, latent=5).network())
    for _ in range(50):
        made(torch.randn(20, 5) * 3 + 1, torch.randint(4, (20,)))
    with torch.no_grad():
        for norm in made.norms:
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return made


def test_what_leaves_is_the_generator_with_its_running_statistics_inside():
    made = dense_generator()
    latents, labels = torch.randn(30, 5), torch.randint(4, (30,))
    with torch.no_grad():
        assert torch.allclose(made.folded()(latents, labels), made.eval()(latents, labels), atol=1e-5)


def test_an_image_of_the_folded_generator_depends_on_its_own_latent_alone():
    made = dense_generator().folded()
    latents, labels = torch.randn(30, 5), torch.randint(4, (30,))
    with torch.no_grad():
        alone = torch.cat([made(latents[i : i + 1], labels[i : i + 1]) for i in range(30)])
        assert torch.allclose(made(latents, labels), alone, atol=1e-6)


def test_the_dense_discriminator_scores_by_label():
    shape = Dense(height=8, width=8, channels=1, classes=3, features=16, latent=5)
    scored = DenseDiscriminator(shape, 16)
    images = torch.rand(3, 1, 8, 8) * 2 - 1
    x = (images.flatten(1) + 1) / 2
    for layer in scored.body:
        x = F.leaky_relu(x @ layer.weight.T + layer.bias, 0.2)
    logits = x @ scored.label.weight.T + scored.label.bias
    alone = x @ scored.score.weight[0] + scored.score.bias
    for label in range(3):
        scores, found = scored.scores_and_logits(images, torch.full((3,), label))
        assert torch.allclose(scores, alone + logits[:, label], atol=1e-5)
        assert torch.allclose(found, logits, atol=1e-5)


def test_the_diversity_is_that_of_the_halves():
    images = torch.tensor([0.0, 1.0, 0.5, -1.0]).view(4, 1, 1, 1)
    assert diversity(images) == pytest.approx((0.5 + 2.0) / 2)


def test_labels_are_taught_by_real_records_alone():
    shape = Dense(height=8, width=8, channels=1, classes=3, features=16, latent=5)
    scored = DenseDiscriminator(shape, 16)
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    real = torch.tensor([True, True, False, False])
    logits = scored.scores_and_logits(images, labels)[1]
    told = -torch.log_softmax(logits, 1)[torch.arange(4), labels]
    expected = adversarial_loss(scored, images, labels, real) + 0.5 * told * torch.tensor([1, 1, 0, 0])
    assert torch.allclose(labelled_loss(0.5)(scored, images, labels, real), expected, atol=1e-6)


# A step


@pytest.mark.parametrize("recipe", [SMALL, DENSE], ids=["conv", "dense"])
def test_a_step_is_line_six_to_eight_of_the_algorithm(recipe):
    """Clipped one by one, summed with the fakes, noised once, divided by twice the expected batch."""
    run = training(recipe=recipe)
    given: list[Tensor] = []
    run.improve_discriminator = given.append
    images, labels = run.records.take(np.arange(7))
    run.mechanism.sampler = FixedSampler(np.arange(7), steps=6)
    before = SeededRng(5), SeededRng(5)
    run.rng, run.mechanism.rng = before[0], before[0]
    run.schedule.generator_turn = lambda: False
    next(run.steps())

    run.rng = before[1]
    fakes, fake_labels = run.sample_fakes(10)
    rows = (torch.cat([images, fakes]), torch.cat([labels, fake_labels]), torch.arange(17) < 7)
    each, _ = clip_rows(record_gradients(run.discriminator, run.loss, rows), run.mechanism.clip_norm)
    noise = before[1].normals(run.mechanism.noise.size)
    expected = (each.sum(0) + noise * 1.0) / 20
    assert torch.allclose(given[0], expected, atol=1e-6)


def test_the_losses_are_those_of_the_paper():
    scores = torch.tensor([0.3, -2.0, 1.5, -0.1])
    real = torch.tensor([True, True, False, False])
    found = adversarial_loss(lambda images, labels: images, scores, None, real)
    d = torch.sigmoid(scores)
    assert torch.allclose(found, torch.where(real, -d.log(), -(1 - d).log()))


@pytest.mark.parametrize("drawn", [0, 1, 25])
def test_the_divisor_is_the_expected_batch_whatever_was_drawn(drawn):
    run = training(clip_norm=0.5)
    given: list[Tensor] = []
    run.improve_discriminator, run.schedule.generator_turn = given.append, lambda: False
    run.mechanism.sampler = FixedSampler(np.arange(drawn), steps=6)
    run.mechanism.release = lambda total: torch.full_like(total, 20.0)
    next(run.steps())
    assert torch.equal(given[0], torch.ones_like(given[0]))


def test_one_noise_draw_for_a_logical_step_however_it_is_cut():
    """A step with nothing in it is noise of the planned strength; so is one cut into seven parts."""
    for physical_batch in (2, 64):
        recipe = DPGANRecipe(**{**SMALL.to_dict(), "physical_batch": physical_batch})
        run = training(recipe=recipe, noise_multiplier=50.0, expected_batch=12.0)
        given: list[Tensor] = []
        run.improve_discriminator, run.schedule.generator_turn = given.append, lambda: False
        run.rng = run.mechanism.rng = SecureRng()
        next(run.steps())
        strength = given[0].std().item() * 2 * 12.0 / (50.0 * run.plan.clip_norm)
        assert abs(strength - 1) < 6 / math.sqrt(2 * run.mechanism.noise.size)
        assert run.mechanism.released == 1


def test_empty_batches_get_their_noise_and_train():
    """N = 50, q = 0.05: one batch in thirteen is empty."""
    run = DPGANTrainer(
        plan(steps=80, sampling_prob=0.05, expected_batch=2.5),
        Rows.random(50),
        rng=SecureRng(),
        recipe=SMALL,
    )
    sizes, moved = [], []
    take = run.records.take

    def counted(indices: np.ndarray) -> tuple[Tensor, Tensor]:
        sizes.append(len(indices))
        return take(indices)

    run.records.take = counted
    before = run.discriminator.score.weight.clone()
    for _ in run.steps():
        after = run.discriminator.score.weight.clone()
        moved.append(not torch.equal(before, after))
        before = after
    assert sizes.count(0) > 0
    assert all(moved)
    assert run.mechanism.released == len(sizes) == 80


# Neighbours


class Recorded:
    """Repeats its randomness and keeps what was released, so that two runs can be laid side by side."""

    def __init__(self, run: DPGANTrainer, replay: list[Tensor] | None = None) -> None:
        self.totals: list[Tensor] = []
        self.released: list[Tensor] = []
        release = run.mechanism.release

        def recorded(total: Tensor) -> Tensor:
            self.totals.append(total.clone())
            out = release(total)
            if replay is not None:
                out = replay[len(self.released)].clone()
            self.released.append(out.clone())
            return out

        run.mechanism.release = recorded


def neighbours() -> list[tuple[str, Rows]]:
    """One record more, replaced by an outlier, by one of a rare class, by one that is no number."""
    base = Rows.random(50)
    added = Rows(
        torch.cat([base.images, torch.ones(1, 1, 8, 8)]), torch.cat([base.labels, torch.tensor([2])])
    )
    removed = Rows(base.images[:-1], base.labels[:-1])
    found = [("added", added), ("removed", removed)]
    for name, image, label in (
        ("outlier", 1.0, 0),
        ("class", 0.3, 2),
        ("nan", math.nan, 0),
        ("huge", 1e30, 1),
    ):
        images, labels = base.images.clone(), base.labels.clone()
        images[-1], labels[-1] = image, label
        found.append((name, Rows(images, labels)))
    return found


class PerRecordRng(SeededRng):
    """Words of a draw are the same for the records both have: one more at the end changes nothing else."""

    def words(self, count: int) -> np.ndarray:
        return super().words(64)[:count] if count in (49, 50, 51) else super().words(count)


@pytest.mark.parametrize("recipe", [SMALL, DENSE], ids=["conv", "dense"])
@pytest.mark.parametrize(("name", "rows"), neighbours(), ids=[name for name, _ in neighbours()])
def test_records_reach_it_through_noised_sums_alone(name, rows, recipe):
    """With the releases held the same, a neighbour changes nothing else, and sums by at most the norm."""

    def run_on(records: Rows, replay: list[Tensor] | None) -> tuple[DPGANTrainer, Recorded, list[object]]:
        run = DPGANTrainer(plan(steps=5, sampling_prob=0.5), records, rng=PerRecordRng(3), recipe=recipe)
        watched = Recorded(run, replay)
        said = list(run.steps())
        return run, watched, said

    one, first, said = run_on(Rows.random(50), None)
    other, second, said_too = run_on(rows, first.released)
    assert said == said_too
    kept, kept_too = one.checkpoint(), other.checkpoint()
    assert all(torch.equal(kept[key], kept_too[key]) for key in kept)
    assert one.synthesizer().to_files() == other.synthesizer().to_files()
    bound = one.plan.clip_norm * (1 if name in ("added", "removed") else 2)
    gaps = [(a.double() - b.double()).norm().item() for a, b in zip(first.totals, second.totals, strict=True)]
    assert max(gaps) <= bound * (1 + 1e-5)
    assert max(gaps) > 0


def test_labels_of_fakes_do_not_follow_the_records():
    rows = Rows.random(50)
    rows.labels[:] = 1
    labels = torch.cat([training(rows, seed=seed).sample_fakes(30)[1] for seed in range(20)])
    assert torch.bincount(labels, minlength=3).min() > 140


def test_the_number_of_fakes_does_not_follow_the_records():
    run = training()
    run.mechanism.sampler = FixedSampler(np.arange(31), steps=6)
    run.schedule.generator_turn = lambda: False
    next(run.steps())
    assert run.fakes == 10
    assert len(run.clipped.norms) == 31 + 10


def test_a_plan_whose_event_says_otherwise_is_refused(monkeypatch):
    cheaper = plan(noise_multiplier=2.0).event()
    monkeypatch.setattr(DPGANPlan, "event", lambda self: cheaper)
    with pytest.raises(Failure) as failure:
        training()
    assert failure.value.fault is Fault.ACCOUNTING_MISMATCH


def test_records_that_are_no_images_of_these_sizes_are_refused():
    rows = Rows.random(5)
    rows.schema = ImageSchema(height=100, width=8, classes=("a",))
    with pytest.raises(Failure) as failure:
        training(rows)
    assert failure.value.fault is Fault.SCHEMA_MISMATCH


def test_weights_that_are_no_numbers_are_a_fault():
    run = training()
    list(run.steps())
    with torch.no_grad():
        run.generator.network.seed.weight[0] = math.nan
    with pytest.raises(Failure) as failure:
        run.synthesizer()
    assert failure.value.fault is Fault.DIVERGED


# The schedule


def test_the_ladder_is_that_of_the_paper():
    assert LADDER[:10] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


def test_a_fixed_frequency_stays():
    schedule = StepSchedule(DPGANRecipe(discriminator_steps=5, accuracy_floor=None))
    assert [schedule.generator_turn() for _ in range(10)] == [False] * 4 + [True] + [False] * 4 + [True]
    for _ in range(1000):
        schedule.update(0.0)
    assert schedule.every == 5


def test_low_accuracy_climbs_the_ladder_after_a_grace():
    schedule = StepSchedule(DPGANRecipe(accuracy_decay=0.9, accuracy_floor=0.6))  # grace of 20
    climbs = []
    for step in range(1, 61):
        schedule.update(0.5)
        if not climbs or climbs[-1][1] != schedule.every:
            climbs.append((step, int(schedule.every)))
    assert climbs == [(1, 1), (20, 2), (40, 5), (60, 10)]


def test_high_accuracy_stays_and_the_average_forgets():
    schedule = StepSchedule(DPGANRecipe(accuracy_decay=0.9, accuracy_floor=0.6))
    for _ in range(100):
        schedule.update(0.9)
    assert schedule.every == 1
    seen = 0.9
    for _ in range(5):
        schedule.update(0.1)
        seen = 0.9 * seen + 0.1 * 0.1
    assert schedule.accuracy.item() == pytest.approx(seen)
    assert schedule.every == 2


def test_the_generator_moves_when_the_pace_says():
    run = training(
        recipe=DPGANRecipe(**{**SMALL.to_dict(), "discriminator_steps": 3, "accuracy_floor": None})
    )
    moved = []
    before = run.generator.network.seed.weight.clone()
    for _ in run.steps():
        moved.append(not torch.equal(before, run.generator.network.seed.weight))
        before = run.generator.network.seed.weight.clone()
    assert moved == [False, False, True] * 2
    assert run.generator.taken == 2


def test_the_average_is_what_leaves_if_asked_for():
    with_average = DPGANRecipe(**{**SMALL.to_dict(), "average_decay": 0.5})
    run = training(recipe=with_average)
    expected = run.generator.network.seed.weight.detach().clone()
    for step, _ in enumerate(run.steps(), start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * run.generator.network.seed.weight.detach()
    left = run.synthesizer().network.seed.weight
    assert torch.allclose(left, expected, atol=1e-6)
    assert not torch.equal(left, run.generator.network.seed.weight)


# Recipes


def test_recipes_read_back_as_they_were_written():
    for name in DPGANRecipe.presets:
        recipe = DPGANRecipe.preset(name)
        assert DPGANRecipe.from_dict(recipe.to_dict()) == recipe
    assert DPGANRecipe.for_device("cpu") == DPGANRecipe.preset("fast-cpu")
    assert DPGANRecipe.for_device("cuda") == DPGANRecipe.preset("paper")


@pytest.mark.parametrize(
    "odd",
    [
        {"seed": 1},
        {"network": "transformer"},
        {"label_weight": 1.0},  # for dense networks only
        {"discriminator_decay": -1.0},
        {"variety": -1.0},
        {"discriminator_features": 15},
        {"generator_features": 8},
        {"latent": 0},
        {"generator_rate": 0.0},
        {"betas": [0.5, 1.0]},
        {"accuracy_floor": 1.5},
        {"average_decay": 1.0},
        {"physical_batch": 0},
        {"latent": "many"},
        {"generator_rate": "fast"},
        {"betas": 3},
        {"betas": None},
    ],
)
def test_odd_recipes_are_refused(odd):
    with pytest.raises(InvalidPlan, match=r"only the fields|out of range|not a number"):
        DPGANRecipe.from_dict(odd)


def test_the_paper_is_a_preset():
    recipe = DPGANRecipe.preset("paper")
    assert (recipe.discriminator_features, recipe.generator_features, recipe.latent) == (128, 128, 128)
    assert (recipe.discriminator_rate, recipe.generator_rate, recipe.betas) == (2e-4, 2e-4, (0.5, 0.999))
    assert (recipe.discriminator_steps, recipe.accuracy_decay, recipe.accuracy_floor) == (1, 0.99, 0.6)


# What leaves


def synthesizer() -> ImageSynthesizer:
    torch.manual_seed(2)
    return ImageSynthesizer(DCGAN(height=9, width=8, channels=3, classes=4, features=16, latent=5))


def test_samples_repeat_and_fewer_are_the_first_of_more():
    made = synthesizer()
    many, few = made.sample(300, seed=7), made.sample(20, seed=7)
    assert many.images.shape == (300, 9, 8, 3)
    assert many.images.dtype == np.uint8
    assert np.array_equal(many.images[:20], few.images)
    assert np.array_equal(many.labels[:20], few.labels)
    assert not np.array_equal(made.sample(20, seed=8).images, few.images)
    assert set(many.labels) == {0, 1, 2, 3}


def test_a_label_can_be_asked_for():
    made = synthesizer()
    assert set(made.sample(10, seed=1, label=2).labels) == {2}
    with pytest.raises(ValueError, match="label"):
        made.sample(1, seed=1, label=4)
    assert len(made.sample(0, seed=1).images) == 0


def test_files_read_back_and_sample_the_same():
    made = synthesizer()
    files = made.to_files()
    assert set(files) == {WEIGHTS, ARCHITECTURE}
    again = ImageSynthesizer.from_files(files)
    assert again.architecture == made.architecture
    assert np.array_equal(again.sample(10, seed=3).images, made.sample(10, seed=3).images)
    assert again.to_files() == files


def test_files_that_hold_anything_else_are_refused():
    from safetensors.torch import load, save

    files = synthesizer().to_files()
    tensors = load(files[WEIGHTS])
    first = next(iter(tensors))
    wrong = [
        {**files, WEIGHTS: save({**tensors, "discriminator.weight": torch.zeros(3)})},
        {**files, WEIGHTS: save({name: value for name, value in tensors.items() if name != first})},
        {**files, WEIGHTS: save({**tensors, first: tensors[first] * math.nan})},
        {**files, WEIGHTS: save({**tensors, first: tensors[first].double()})},
        {**files, WEIGHTS: b"\x80\x04pickle"},
        {**files, ARCHITECTURE: b"{}"},
        {**files, ARCHITECTURE: files[ARCHITECTURE].replace(b'"version": 1', b'"version": 2')},
        {**files, ARCHITECTURE: files[ARCHITECTURE].replace(b'"latent": 5', b'"latent": 6')},
        {**files, ARCHITECTURE: files[ARCHITECTURE].replace(b'"height": 9', b'"height": 9000')},
        {WEIGHTS: files[WEIGHTS]},
    ]
    for bad in wrong:
        with pytest.raises(UnfitSynthesizer):
            ImageSynthesizer.from_files(bad)


def test_a_synthesizer_holds_the_generator_and_nothing_of_the_discriminator():
    run = training()
    list(run.steps())
    from safetensors.torch import load

    assert set(load(run.synthesizer().to_files()[WEIGHTS])) == set(
        dict(run.generator.network.named_parameters())
    )
