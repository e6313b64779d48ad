"""Images as rows of patches, and back: convolutions become products of matrices. Channels last throughout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


def patches(images: Tensor, kernel: Size, *, stride: Size, padding: Size, dilation: Size = (1, 1)) -> Tensor:
    """What a kernel sees at each of its places: N, H, W, C to N, places, kernel height * width * C."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    padded = F.pad(images, (0, 0, pw, pw, ph, ph)).contiguous()
    count, height, width, channels = padded.shape
    down = (height - dh * (kh - 1) - 1) // sh + 1
    across = (width - dw * (kw - 1) - 1) // sw + 1
    n, h, w, c = padded.stride()
    shape, steps = (count, down, across, kh, kw, channels), (n, h * sh, w * sw, h * dh, w * dw, c)
    return padded.as_strided(shape, steps).reshape(count, down * across, kh * kw * channels)


def half(size: Size) -> Size:
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def halving_kernel(size: Size) -> Size:
    """The kernel that halves an image of this size with stride 2 and padding 1."""
    return (3 if size[0] % 2 else 4, 3 if size[1] % 2 else 4)


def _halved(images: Tensor) -> Tensor:
    size = (images.shape[1], images.shape[2])
    return patches(images, halving_kernel(size), stride=(2, 2), padding=(1, 1))


def _doubled(pieces: Tensor, size: Size) -> Tensor:
    (kh, kw), (down, across) = halving_kernel(size), half(size)
    pieces = pieces.view(len(pieces), down, across, kh, kw, -1)
    padded = pieces.new_zeros(len(pieces), 2 * down + 2, 2 * across + 2, pieces.shape[-1])
    for i in range(kh):
        for j in range(kw):
            padded[:, i : i + 2 * down : 2, j : j + 2 * across : 2] += pieces[:, :, :, i, j]
    return padded[:, 1 : size[0] + 1, 1 : size[1] + 1]


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.size = (images.shape[1], images.shape[2])
        return _halved(images)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _doubled(gradient, ctx.size)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, pieces: Tensor, size: Size) -> Tensor:
        return _doubled(pieces, size)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _halved(gradient), None


def halved(images: Tensor) -> Tensor:
    """The patches of the kernel that halves: N, H, W, C to N, H/2 * W/2, kernel * C."""
    return _Halve.apply(images)


def doubled(pieces: Tensor, size: Size) -> Tensor:
    """The other way: patches laid over each other and summed, to N, H, W, C of the given size."""
    return _Double.apply(pieces, size)
