"""Builds HACRL for pip: a wheel that installs one name, ``hacrl``, with the three packages inside it.

setuptools builds the wheel as the work tree is. Then ``flows``, ``stages`` and ``hacrl_core`` move into ``hacrl/``, and
their import statements follow: ``from stages.spec import …`` becomes ``from hacrl.stages.spec import …``. So a user's
own ``stages.py`` and ours never meet. An editable install stays what setuptools makes of it.
"""

import ast
import base64
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta

# What pip asks for, as setuptools answers it.
build_editable = build_meta.build_editable
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

_MOVED = ("flows", "stages", "hacrl_core")
_MOVED_MODULE = re.compile(rf"\b({'|'.join(_MOVED)})\b(?=[.:])")


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, with everything below ``hacrl``."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory) / name
    wheel.write_bytes(below_one_name(wheel.read_bytes()))
    return name


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Build the source archive, with this file, which setuptools does not know to be needed."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory) / name
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member)) for member in old]
        content = [(member, file.read() if file else b"") for member, file in members]
    own = Path(__file__).read_bytes()
    ours = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/infra/{Path(__file__).name}")
    ours.size, ours.mtime = len(own), content[0][0].mtime
    with tarfile.open(path, "w:gz") as new:
        for member, data in [*content, (ours, own)]:
            new.addfile(member, io.BytesIO(data))
    return name


def below_one_name(wheel: bytes) -> bytes:
    """Return a wheel whose only top-level package is ``hacrl``."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as old:
        files = {entry: old.read(entry) for entry in old.infolist() if not entry.filename.endswith("/RECORD")}
        (record,) = (name for name in old.namelist() if name.endswith("/RECORD"))
    output, lines = io.BytesIO(), []
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, data in files.items():
            entry.filename, data = _moved(entry.filename, data)
            new.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{entry.filename},sha256={digest},{len(data)}\n")
        new.writestr(record, "".join([*lines, f"{record},,\n"]))
    return output.getvalue()


def _moved(name: str, data: bytes) -> tuple[str, bytes]:
    """Return the name and the content of a wheel's file after the move."""
    if name.endswith(".dist-info/entry_points.txt"):
        return name, _MOVED_MODULE.sub(r"hacrl.\1", data.decode()).encode()
    if name.endswith(".dist-info/top_level.txt"):
        return name, b"hacrl\n"
    if name.endswith(".py"):
        data = _with_moved_imports(data.decode(), name).encode()
    return (f"hacrl/{name}" if name.partition("/")[0] in _MOVED else name), data


def _with_moved_imports(text: str, name: str) -> str:
    """Return a module whose ``from`` imports of the moved packages name their new place; lines keep their numbers."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in _MOVED for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: write 'from … import …', which this build can translate")
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.partition(".")[0] not in _MOVED:
                continue
            # The columns of ast count bytes.
            line = lines[node.lineno - 1].encode()
            start, statement = line[: node.col_offset], line[node.col_offset :]
            statement = statement.replace(b"from ", b"from hacrl.", 1)
            lines[node.lineno - 1] = (start + statement).decode()
    return "".join(lines)
