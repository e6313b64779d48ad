"""What every network of a synthesizer is described by: public facts, as JSON, and no code."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from torch import nn


class UnfitSynthesizer(ValueError):
    """The files do not hold exactly one synthesizer of a known kind."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of an image, how many classes, how many latents; each kind of network adds its own sizes.

    `network()` is the untrained network: called with latents (N, latent) and labels (N), it gives images in
    [-1, 1] as N, C, H, W, each made from its own latent and label alone.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    limits: ClassVar[dict[str, tuple[int, int]]] = {}

    height: int
    width: int
    channels: int
    classes: int
    latent: int = 128

    def __post_init__(self) -> None:
        shared = {"height": (8, 64), "width": (8, 64), "channels": (1, 4), "classes": (1, 1000)}
        for name, (least, most) in {**shared, "latent": (1, 4096), **self.limits}.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UnfitSynthesizer(f"{name} is {value!r}; give a whole number from {least} to {most}")

    def network(self) -> nn.Module:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version, **asdict(self)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Self:
        known = {"kind", "version", *(field.name for field in fields(cls))}
        if set(body) != known:
            raise UnfitSynthesizer(f"an architecture has exactly {sorted(known)}")
        if (body["kind"], body["version"]) != (cls.kind, cls.version):
            raise UnfitSynthesizer(f"the architecture is not a {cls.kind} of version {cls.version}")
        return cls(**{name: value for name, value in body.items() if name not in ("kind", "version")})
