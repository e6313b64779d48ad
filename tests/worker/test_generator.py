"""A gradient moves the weights it belongs to, however it lies in memory."""

import pytest
import torch

from sluice.generators.dcgan import DCGAN
from worker.trainers.generator import apply_gradients, update_ema


def test_a_step_is_the_same_for_a_gradient_in_any_layout():
    torch.manual_seed(0)
    gradient = torch.randn(4, 3)
    ends = []
    for given in (gradient, gradient.t().contiguous().t()):
        weight = torch.nn.Parameter(torch.zeros(4, 3))
        apply_gradients(torch.optim.Adam([weight], lr=1.0, fused=True), [given])
        ends.append(weight.detach())
    assert torch.equal(*ends)
    assert torch.equal(ends[0].sign(), -gradient.sign())


def test_the_generator_of_the_paper_goes_where_its_gradient_points():
    """Its gradients are views of products, which a fused optimizer would read in the wrong order."""
    torch.manual_seed(0)
    network = DCGAN(height=8, width=8, channels=1, classes=3, latent=4, features=16).network()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    loss = network(torch.randn(6, 4), torch.arange(6) % 3).square().sum()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    assert not all(gradient.is_contiguous() for gradient in gradients)
    apply_gradients(torch.optim.Adam(network.parameters(), lr=1e-3, fused=True), gradients)
    for old, new, gradient in zip(before, network.parameters(), gradients, strict=True):
        felt = gradient.abs() > 1e-6  # Adam's first step is a sign, except of almost nothing
        assert torch.equal((new - old)[felt].sign(), -gradient[felt].sign())


def test_an_average_starts_quick_and_without_decay_is_the_last():
    mean, value = torch.zeros(1), torch.ones(1)
    update_ema([mean], [value], steps=1, decay=0.99)
    assert mean.item() == pytest.approx(1 - 2 / 11)
    update_ema([mean], [torch.full((1,), 5.0)], steps=2, decay=None)
    assert mean.item() == 5.0
