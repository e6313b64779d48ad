"""Chooses TCP ports that nothing else on this machine takes before a server binds them."""

import secrets
import socket
import sys

HOST = "127.0.0.1"
SIZE = 16
# Below Linux's ephemeral range (32768 and up), which the kernel uses for outgoing connections.
# A block includes the ports OFFSET above its own: SeaweedFS always connects to its admin port + 10000.
_FIRST, OFFSET = 10_000, 10_000

_reserved: dict[int, socket.socket | None] = {}  # first port of a block of this process → its lock
_single: list[int] = []  # ports of the newest block that `free_port` has not returned yet


def port_is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
        return True


def reserve(first: int) -> bool:
    """Reserves a block of ports until this process ends; False if another Sluice has it.

    The lock is a socket in Linux's abstract namespace, which has the same scope as ports and needs no file.
    """
    if first in _reserved:
        return True
    lock = None
    if sys.platform == "linux":
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0sluice-ports-{first}")
        except OSError:
            lock.close()
            return False
    _reserved[first] = lock
    return True


def reserve_block() -> int:
    """Reserves a block in which every port is free; returns its first port."""
    count = OFFSET // SIZE
    start = secrets.randbelow(count)
    for number in range(count):
        first = _FIRST + (start + number) % count * SIZE
        ports = [base + n for base in (first, first + OFFSET) for n in range(SIZE)]
        if first not in _reserved and all(map(port_is_free, ports)) and reserve(first):
            return first
    raise OSError("no free ports are left on this machine")


def free_port() -> int:
    """A free port, different on every call."""
    if not _single:
        first = reserve_block()
        _single.extend(range(first, first + SIZE))
    return _single.pop()
