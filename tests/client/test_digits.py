"""Digits for the demo: reproducible, all ten of them, and no two alike."""

import numpy as np

from local.digits import SIZE, draw


def test_the_same_seed_draws_the_same_images():
    x, y = draw(700, seed=3)
    again, labels = draw(700, seed=3)
    assert np.array_equal(x, again)
    assert np.array_equal(y, labels)
    assert not np.array_equal(x, draw(700, seed=4)[0])


def test_every_digit_comes_up_and_no_image_twice():
    x, y = draw(1000, seed=3)
    assert (x.shape, x.dtype, y.dtype) == ((1000, SIZE, SIZE), np.uint8, np.int64)
    assert np.bincount(y, minlength=10).min() > 60
    assert len({image.tobytes() for image in x}) == 1000


def test_digits_lie_within_the_image_white_on_black():
    x, _ = draw(1000, seed=3)
    edge = np.concatenate([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], 1)
    assert (edge > 0).mean() < 0.01
    assert 0.1 < (x > 64).mean() < 0.35


def test_a_simple_rule_learns_them():
    """What the demo measures is the synthetic data, not whether these digits can be told apart."""
    from sklearn.linear_model import LogisticRegression

    x, y = draw(2000, seed=3)
    fresh, labels = draw(500, seed=4)
    model = LogisticRegression(max_iter=30, tol=0.01).fit(x.reshape(2000, -1) / 255, y)
    assert model.score(fresh.reshape(500, -1) / 255, labels) > 0.85
