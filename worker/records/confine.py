"""Sandbox for the process that parses uploads: resource limits first, then no files, programs or network.

Limits work on every system. The rest is what Linux allows without privileges (namespaces, Landlock, seccomp);
each is tried on its own, so a kernel that lacks one still applies the others.
"""

import ctypes
import platform
import resource
import signal
import struct
import sys

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SET_DEATH_SIGNAL, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of access rights in each version of Landlock

# socket, execve, execveat, ptrace, process_vm_readv, process_vm_writev, io_uring_setup; and setpgid, setsid:
# a child process stays in the process group that is killed.
_REFUSED = {
    "x86_64": (0xC000003E, (41, 59, 322, 101, 310, 311, 425, 109, 112)),
    "aarch64": (0xC00000B7, (198, 221, 281, 117, 270, 271, 425, 154, 157)),
}


def limit_resources(*, memory_bytes: int, file_bytes: int, seconds: int) -> None:
    """Sets hard limits and leaves the network namespace; called before any parser is imported."""
    for resource_type, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_type, (limit, limit))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # ends with the worker
        # A user namespace as well, where allowed: root outside is nobody inside.
        if libc.unshare(_NEW_USER | _NEW_NET):
            libc.unshare(_NEW_NET)


def restrict() -> None:
    """Refuses everything but open handles; called when every import is done."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _refuse_files(libc)
    _refuse_calls(libc)


def _refuse_files(libc: ctypes.CDLL) -> None:
    """Enters a Landlock domain without rules: no path can be opened, /proc/<pid>/environ included."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    handled = ctypes.c_uint64((1 << _FILE_RIGHTS.get(version, 16)) - 1)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)


def _refuse_calls(libc: ctypes.CDLL) -> None:
    """Installs a seccomp filter for what Landlock does not cover; works in containers without namespaces."""
    if platform.machine() not in _REFUSED:
        return
    architecture, calls = _REFUSED[platform.machine()]
    load, jump_equal, jump_above, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: as EPERM
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers above 2^30 are the same calls in the x32 ABI.
    tests = [(jump_above, 1 << 30), *((jump_equal, number) for number in calls)]
    for place, (test, number) in enumerate(tests):
        program.append((test, len(tests) - place, 0, number))
    program += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    whole = Filter(len(program), ctypes.addressof(code))
    libc.prctl(_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0)
