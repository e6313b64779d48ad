"""Sluice: synthetic data under differential privacy. This is the library: client, verification, accounting.

    import sluice

    release = sluice.Sluice("https://sluice.example.org", key).release("digits")
    release.download("digits")
    sluice.verify("digits")
    sluice.epsilon(noise_multiplier=1.1, sampling_prob=0.01, steps=1000, delta=1e-5)

Names are imported on first use, so `import sluice` loads no other package. docs/api-python.md lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.accounting import epsilon as epsilon
    from sluice.client.api import Sluice as Sluice
    from sluice.client.problems import CannotRun as CannotRun
    from sluice.client.problems import NotVerified as NotVerified
    from sluice.client.problems import Refused as Refused
    from sluice.client.release import Release as Release
    from sluice.client.verify import verify as verify
    from sluice.problems import Problem as Problem

    __version__: str

_MODULES = {
    "Sluice": "sluice.client.api",
    "Release": "sluice.client.release",
    "verify": "sluice.client.verify",
    "epsilon": "sluice.accounting",
    "CannotRun": "sluice.client.problems",
    "Refused": "sluice.client.problems",
    "NotVerified": "sluice.client.problems",
    "Problem": "sluice.problems",
}

__all__ = [
    "CannotRun",
    "NotVerified",
    "Problem",
    "Refused",
    "Release",
    "Sluice",
    "__version__",
    "epsilon",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sluice")
    if name not in _MODULES:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
