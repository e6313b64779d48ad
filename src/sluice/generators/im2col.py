"""Images as rows of patches, and back: convolutions become products of matrices. Channels last throughout."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = tuple[int, int]


def im2col(images: Tensor, kernel: Size, *, stride: Size, padding: Size, dilation: Size = (1, 1)) -> Tensor:
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
    return im2col(images, halving_kernel(size), stride=(2, 2), padding=(1, 1))


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
    return _Halve.apply(images)  # type: ignore[no-untyped-call]


def doubled(pieces: Tensor, size: Size) -> Tensor:
    """The other way: patches laid over each other and summed, to N, H, W, C of the given size."""
    return _Double.apply(pieces, size)  # type: ignore[no-untyped-call]


Way = tuple[Size, tuple[slice, slice], tuple[slice, slice]]


def _taps(side: int, parity: int) -> Iterator[tuple[int, slice, slice]]:
    """The taps of the kernel that reach the even or the odd places of a side: each from where, to where."""
    for tap in range(1 - parity, halving_kernel((side, side))[0], 2):
        first, stop, ahead = int(tap == 0), (side - max(tap, 1)) // 2 + 1, (tap - 1) // 2
        yield tap, slice(first, stop), slice(first + ahead, stop + ahead)


def _planes(size: Size) -> Iterator[tuple[tuple[slice, slice], list[Way]]]:
    """Every second place of every second row, four times over, each with the ways that lead there."""
    for down, across in ((0, 0), (0, 1), (1, 0), (1, 1)):
        columns = list(_taps(size[1], across))
        ways = [((i, j), (y, x), (v, u)) for i, y, v in _taps(size[0], down) for j, x, u in columns]
        yield (slice(down, None, 2), slice(across, None, 2)), ways


class _Enlarge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, size: Size, slope: float) -> Tensor:
        taps = weight.permute(2, 3, 0, 1).contiguous()
        made = x.new_empty(*size, x.shape[2], len(bias))
        for places, ways in _planes(size):
            plane = bias.expand(made[places].shape).contiguous()
            for tap, given, to in ways:
                rows = plane[to].flatten(1, 2)
                rows.baddbmm_(x[given].flatten(1, 2), taps[tap].expand(len(rows), -1, -1))
            made[places] = F.leaky_relu_(plane, slope)
        ctx.save_for_backward(x, taps, made)
        ctx.size, ctx.slope = size, slope
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, made = ctx.saved_tensors
        for_x, for_taps, for_bias = torch.zeros_like(x), torch.empty_like(taps), taps.new_zeros(made.shape[3])
        for places, ways in _planes(ctx.size):
            plane = torch.ops.aten.leaky_relu_backward(gradient[places], made[places], ctx.slope, True)
            plane = plane.contiguous()
            for_bias += plane.sum((0, 1, 2))
            for tap, given, to in ways:
                rows = plane[to].flatten(1, 2)
                for_x[given].flatten(1, 2).baddbmm_(rows, taps[tap].T.expand(len(rows), -1, -1))
                for_taps[tap] = (x[given].flatten(1, 2).mT @ rows).sum(0)
        return for_x, for_taps.permute(2, 3, 0, 1), for_bias, None, None


def enlarged(x: Tensor, layer: nn.ConvTranspose2d, size: Size, *, slope: float) -> Tensor:
    """A transposed convolution that doubles, to the given size, and a leaky rectifier, on H, W, N, C.

    With places first, what a tap of the kernel reads and what it adds to are rows of matrices where they lie:
    nothing is copied into patches, and products that would fall beside the image are left out.
    """
    parts = (layer.weight, layer.bias)
    return _Enlarge.apply(x.contiguous(), *parts, size, slope)  # type: ignore[no-untyped-call]
