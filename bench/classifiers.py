"""The three classifiers of the DP-Sinkhorn paper, appendix D.2, for training on synthetic data.

Images are uint8 (N, H, W, C) and are scaled to [0, 1]. A tenth of the training data is held out; training
stops when accuracy there has not improved for `patience` epochs, and the best epoch's weights are kept.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

BATCH = 128
MOST_EPOCHS = 300


def seen(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(255)


def logistic(images: np.ndarray, labels: np.ndarray, classes: int, *, device: str) -> nn.Module:
    """Multinomial regression by L-BFGS, at most 5,000 iterations, with the ridge penalty of scikit-learn."""
    rows = seen(images).flatten(1).to(device)
    wanted = torch.from_numpy(labels).to(device)
    size = rows.shape[1]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        both = torch.from_numpy(flat).float().view(classes, size + 1).to(device).requires_grad_()
        weight, bias = both[:, :size], both[:, size]
        value = F.cross_entropy(F.linear(rows, weight, bias), wanted) + weight.square().sum() / (
            2 * len(rows)
        )
        (gradient,) = torch.autograd.grad(value, both)
        return value.item(), gradient.double().cpu().numpy().ravel()

    found = minimize(
        loss,
        np.zeros(classes * (size + 1)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "gtol": 1e-4, "ftol": 64 * np.finfo(float).eps},
    )
    both = torch.from_numpy(found.x).float().view(classes, size + 1)
    linear = nn.Linear(size, classes)
    with torch.no_grad():
        linear.weight.copy_(both[:, :size])
        linear.bias.copy_(both[:, size])
    return nn.Sequential(nn.Flatten(), linear).to(device)


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    height, width, channels = shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(height * width * channels, 100), nn.ReLU(), nn.Linear(100, classes)
    )


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    height, width, channels = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(64 * (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2), classes),
    )


def fit(
    network: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    patience: int,
    seed: int,
    device: str,
    most: int = MOST_EPOCHS,
) -> tuple[nn.Module, int]:
    """Trains by Adam with default parameters and early stopping; returns the best network and the epochs."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).numpy()
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]
    network = network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    best, best_state, since = -1.0, {}, 0
    shuffles = np.random.default_rng(seed)
    epochs = 0
    while since < patience and epochs < most:
        epochs += 1
        network.train()
        shuffled = shuffles.permutation(kept)
        for start in range(0, len(shuffled), BATCH):
            rows = shuffled[start : start + BATCH]
            scores = network(seen(images[rows]).to(device))
            loss = F.cross_entropy(scores, torch.from_numpy(labels[rows]).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached = accuracy(network, images[held], labels[held], device=device)
        since += 1
        if reached > best:
            best, best_state, since = reached, copy.deepcopy(network.state_dict()), 0
    network.load_state_dict(best_state)
    return network, epochs


@torch.inference_mode()
def predictions(network: nn.Module, images: np.ndarray, *, device: str) -> np.ndarray:
    network.eval()
    parts = [network(seen(part).to(device)).argmax(1).cpu() for part in _pieces(images)]
    return torch.cat(parts).numpy()


def accuracy(network: nn.Module, images: np.ndarray, labels: np.ndarray, *, device: str) -> float:
    return float((predictions(network, images, device=device) == labels).mean())


def _pieces(images: np.ndarray) -> list[np.ndarray]:
    return np.array_split(images, max(1, len(images) // 1000))
