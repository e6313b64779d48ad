"""Architectures: the public description of a network as JSON; and networks in files, without any code."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from safetensors.torch import load, save
from torch import nn


class UnfitSynthesizer(ValueError):
    """The files do not hold exactly one synthesizer of a known kind."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Image size, number of classes and of latents; each kind of network adds its own sizes.

    `network()` is the untrained network: called with latents (N, latent) and labels (N), it returns images in
    [-1, 1] as N, C, H, W, each computed from its own latent and label alone.
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
    def from_dict(cls, body: Any) -> Self:
        names = {"kind", "version", *(field.name for field in fields(cls))}
        if not isinstance(body, dict) or set(body) != names:
            raise UnfitSynthesizer(f"an architecture has exactly {sorted(names)}")
        if (body["kind"], body["version"]) != (cls.kind, cls.version):
            raise UnfitSynthesizer(f"the architecture is not a {cls.kind} of version {cls.version}")
        return cls(**{name: value for name, value in body.items() if name not in ("kind", "version")})


class NetworkInFiles:
    """A trained network as two files: weights as safetensors, architecture as JSON."""

    file_names: ClassVar[tuple[str, str]]  # of the weights and of the architecture

    def __init__(self, architecture: Any, network: Any = None) -> None:
        self.architecture = architecture
        self.network = network or architecture.network()

    @classmethod
    def read_architecture(cls, body: Any) -> Architecture:
        raise NotImplementedError

    def to_files(self) -> dict[str, bytes]:
        weights = {name: value.cpu().contiguous() for name, value in self.network.state_dict().items()}
        body = json.dumps(self.architecture.to_dict(), sort_keys=True, indent=2) + "\n"
        return dict(zip(self.file_names, (save(weights), body.encode()), strict=True))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Reads exactly what `to_files` writes: these tensors, these shapes, finite numbers, nothing else."""
        weights_name, architecture_name = cls.file_names
        try:
            shape = cls.read_architecture(json.loads(files[architecture_name]))
            weights = load(files[weights_name])
        except UnfitSynthesizer:
            raise
        except Exception as problem:
            kind = architecture_name.partition(".")[0]
            raise UnfitSynthesizer(f"the files cannot be read as a {kind}") from problem
        network = shape.network()
        expected = {name: (value.shape, value.dtype) for name, value in network.state_dict().items()}
        if {name: (value.shape, value.dtype) for name, value in weights.items()} != expected:
            raise UnfitSynthesizer("the tensors are not those of the architecture")
        if not all(value.isfinite().all() for value in weights.values()):
            raise UnfitSynthesizer("a weight is not a finite number")
        network.load_state_dict(weights)
        return cls(shape, network)
