"""Ports for local servers: nobody else takes them between their choice and their use."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from local import ports

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="ranges and abstract sockets of Linux")


def owned(first):
    return {base + n for base in (first, first + ports.OFFSET) for n in range(ports.SIZE)}


@LINUX_ONLY
def test_the_kernel_gives_no_port_of_ours_to_an_outgoing_connection():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        assert max(owned(ports.reserve_block())) < lowest


@LINUX_ONLY
def test_processes_that_choose_at_the_same_time_choose_different_blocks():
    script = (
        "import sys; from local import ports\n"
        "print(*(ports.reserve_block() for _ in range(20)), flush=True); sys.stdin.read()"
    )
    run = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    others = [subprocess.Popen([sys.executable, "-c", script], **run) for _ in range(3)]
    firsts = [int(first) for other in others for first in other.stdout.readline().split()]
    assert len(firsts) == len(set(firsts)) == 60
    taken = [first for first in firsts if ports.reserve(first)]
    for other in others:
        other.communicate()
    assert taken == []
    assert ports.reserve(firsts[0])  # its holder has ended


def test_a_block_with_a_port_in_use_is_passed_over(monkeypatch):
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: 0)
    first = ports.reserve_block()
    with socket.create_server((ports.HOST, first + ports.SIZE + ports.OFFSET + 3)):
        assert ports.reserve_block() > first + ports.SIZE


def test_no_port_is_given_twice():
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == 50
