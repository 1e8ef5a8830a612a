"""manifest.json: everything in a checkpoint except the elements of its tensors, with the checksums of all files.

The file is exactly `{"sha256":"…","content":…}` and a newline. The checksum is that of the bytes of the content, so that a
change of any single byte is detected. File names are not read from it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated

import msgspec

from gyrostat.core.errors import DamagedCheckpoint
from gyrostat.core.progress import Progress
from gyrostat.engine.state.statetree import Skeleton

FORMAT = 1

MANIFEST = "manifest.json"
SHARED = "shared.safetensors"
CONTEXTS = "contexts.safetensors"

_PREFIX, _MIDDLE, _SUFFIX = b'{"sha256":"', b'","content":', b"}\n"
_START = len(_PREFIX) + 64 + len(_MIDDLE)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size and checksum that a file must have."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    format: int
    gyrostat: str
    """The version that wrote it; informative."""
    torch: str
    created: float
    """Seconds since 1970."""
    progress: Progress
    job: Skeleton
    fingerprint: dict[str, str]
    shared_file: FileRecord
    contexts_file: FileRecord
    shared: Skeleton
    contexts: Skeleton


class _Version(msgspec.Struct):
    format: int


def to_bytes(manifest: Manifest) -> bytes:
    """The whole file."""
    content = msgspec.json.encode(manifest)
    return b"".join((_PREFIX, sha256(content).hexdigest().encode(), _MIDDLE, content, _SUFFIX))


def from_bytes(data: bytes) -> Manifest:
    """The inverse. Raises DamagedCheckpoint with the reason."""
    content = data[_START : -len(_SUFFIX)]
    expected = b"".join((_PREFIX, sha256(content).hexdigest().encode(), _MIDDLE, content, _SUFFIX))
    if data != expected:
        raise DamagedCheckpoint(f"the checksum of {MANIFEST} is wrong: it was cut off or altered")
    try:
        version = msgspec.json.decode(content, type=_Version).format
        if version != FORMAT:
            raise DamagedCheckpoint(
                f"its format is {version}, and this version of gyrostat reads format {FORMAT} only; "
                "use the version that wrote it"
            )
        return msgspec.json.decode(content, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is not what gyrostat writes: {error}") from None
