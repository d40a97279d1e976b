"""What a Parquet file says about the library that wrote it, taken out before the file leaves a party."""

import struct
from pathlib import Path

import pyarrow.parquet as pq

from hacrl_core.errors import ContractError

# In a file's footer, the field "created by" follows the one before it (1) and is a text (8), in Thrift's compact form.
_FIELD = b"\x18"
WRITER = b"hacrl"
_END = 8  # the footer's length and the letters PAR1


def remove_writer(path: Path) -> None:
    """Replace the name and version of the writing library in a Parquet file by ``hacrl``; the tables stay as they are.

    Which versions a party runs is its own business, and files with the same content become equal whoever wrote them.
    """
    data = path.read_bytes()
    length = struct.unpack("<I", data[-_END:-4])[0]
    body, footer = data[: -_END - length], data[-_END - length : -_END]
    named = (pq.read_metadata(path).created_by or "").encode()
    if named == WRITER:
        return
    before = _FIELD + bytes([len(named)]) + named
    if not named or len(named) > 127 or footer.count(before) != 1:
        raise ContractError(f"{path.name}: cannot find in it which library wrote it; it must not leave this party")
    footer = footer.replace(before, _FIELD + bytes([len(WRITER)]) + WRITER)
    path.write_bytes(body + footer + struct.pack("<I", len(footer)) + data[-4:])
