"""Opens zips strictly: every byte must belong to one plain member. Members are streams, never files."""

import codecs
import os
import re
import stat
import struct
import zipfile
from typing import IO

from core.faults import Failure, Fault
from worker.records.reading import Allowance, check

codecs.lookup("cp437")  # the encoding of old names; loaded before the sandbox refuses to open files

_LOCAL = struct.Struct("<4s22sHH")
_END = struct.Struct("<4s16sH")
_HAS_DESCRIPTOR, _ENCRYPTED = 0x8, 0x1 | 0x40 | 0x2000
_DESCRIPTOR_SIZES = (12, 16, 20, 24)
# A name only selects an array or a class here; odd ones could harm others who unpack the file.
_PLAIN = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))\w[\w .()+-]{0,199}")


def open_archive(file: IO[bytes], *, allowance: Allowance) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        raise Failure(Fault.NOT_AN_ARCHIVE) from None
    members = archive.infolist()
    check(bool(members), Fault.EMPTY)
    check(len({member.filename for member in members}) == len(members), Fault.UNSAFE_CONTENT)
    for member in members:
        _refuse_odd(member)
    _refuse_slack(file, archive)
    # A member never yields more than it declares, so this bounds the whole archive.
    allowance.take(sum(member.file_size for member in members))
    return archive


def plain(name: str) -> bool:
    return _PLAIN.fullmatch(name) is not None


def _refuse_odd(member: zipfile.ZipInfo) -> None:
    kind = stat.S_IFMT(member.external_attr >> 16)
    check(kind in (0, stat.S_IFREG, stat.S_IFDIR), Fault.UNSAFE_CONTENT)
    check(not member.flag_bits & _ENCRYPTED, Fault.UNSAFE_CONTENT)
    # An empty name, or one that was cut at a NUL.
    check(member.filename == member.orig_filename != "", Fault.UNSAFE_CONTENT)
    check(member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), Fault.UNSUPPORTED_FORMAT)


def _refuse_slack(file: IO[bytes], archive: zipfile.ZipFile) -> None:
    """Refuses overlapping members (bombs) and bytes outside of members (a second file inside the file)."""
    file.seek(-_END.size, os.SEEK_END)
    magic, _, comment = _END.unpack(file.read(_END.size))
    check(magic == b"PK\5\6" and not comment, Fault.UNSAFE_CONTENT)
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    starts = [*(member.header_offset for member in members), archive.start_dir]
    check(starts[0] == 0, Fault.UNSAFE_CONTENT)
    for member, following in zip(members, starts[1:], strict=True):
        file.seek(member.header_offset)
        header = file.read(_LOCAL.size)
        check(len(header) == _LOCAL.size, Fault.DAMAGED)
        _, _, name, extra = _LOCAL.unpack(header)
        slack = following - (member.header_offset + _LOCAL.size + name + extra + member.compress_size)
        allowed = _DESCRIPTOR_SIZES if member.flag_bits & _HAS_DESCRIPTOR else (0,)
        check(slack in allowed, Fault.UNSAFE_CONTENT)
