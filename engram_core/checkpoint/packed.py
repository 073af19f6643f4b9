"""The packed file that placement "file" maps, and the JSON beside it that says what it is.

``engram-layer-N.rows`` is the rows one after another and nothing else (``engram_core.storage`` maps it as it is). The
``.json`` beside it holds the geometry, where the rows came from, and a SHA-256 for each chunk of rows: 94 GiB are
opened by their size alone, in no time, and checked whole when somebody asks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engram_core.errors import TableError
from engram_core.formats import packed_width

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

FORMAT: Final = "engram-packed-rows-1"
_NEED: Final = "engram-core pack makes it anew"


def packed_path(folder: str | Path, layer_id: int) -> Path:
    """Where a layer's rows lie in a folder of packed tables."""
    return Path(folder) / f"engram-layer-{layer_id}.rows"


@dataclass(frozen=True)
class PackedFile:
    """``rows`` of ``head_dim`` values of layer ``layer_id``; ``checksums``: SHA-256 (hex) of each ``chunk_rows`` rows.

    ``source``: what it was made from, in words that name the checkpoint's tensors, sizes and times.
    """

    path: Path
    layer_id: int
    rows: int
    head_dim: int
    chunk_rows: int
    checksums: tuple[str, ...]
    source: dict[str, Any]

    @property
    def width(self) -> int:
        """Bytes of a row, W."""
        return packed_width(self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.rows * self.width

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the chunks' checksums: two files with the same one hold the same rows."""
        return hashlib.sha256("".join(self.checksums).encode()).hexdigest()

    def sidecar(self) -> str:
        """The JSON beside the file."""
        held = {key: value for key, value in asdict(self).items() if key != "path"}
        return json.dumps({"format": FORMAT, "fingerprint": self.fingerprint, **held}, indent=1) + "\n"

    @classmethod
    def open(cls, path: str | Path) -> PackedFile:
        """Read the JSON beside ``path`` and compare sizes.

        Raises :class:`TableError` for a file that is missing, damaged or of another size, with both numbers.
        """
        path = Path(path)
        beside = sidecar_path(path)
        try:
            size = path.stat().st_size
            held = json.loads(beside.read_text(encoding="utf-8"))
        except OSError as error:
            raise TableError(f"{error.filename}: {error.strerror}; a packed table is needed ({_NEED})") from None
        except ValueError as error:
            raise TableError(f"{beside}: not JSON ({error}); {_NEED}") from None
        packed = _parse(path, beside, held)
        if size != packed.nbytes:
            raise TableError(f"{path}: has {size} bytes; {packed.rows} rows of {packed.width} need {packed.nbytes}")
        return packed

    def check(self, config: EngramConfig, layer_id: int) -> None:
        """Raises :class:`TableError` if it is not the table of ``config``'s layer ``layer_id``."""
        rows = config.num_embeddings[config.layer_ids.index(layer_id)]
        have = (self.layer_id, self.rows, self.head_dim)
        if have != (layer_id, rows, config.head_dim):
            raise TableError(
                f"{self.path}: holds layer {have[0]}, {have[1]} rows of {have[2]} values; the configuration needs "
                f"layer {layer_id}, {rows} rows of {config.head_dim}"
            )

    def damaged(self, report: Callable[[int], None] = lambda count: None) -> list[int]:
        """Read the whole file; the chunks whose checksum is another than when they were written."""
        found = []
        chunk = self.chunk_rows * self.width
        try:
            with open(self.path, "rb") as file:
                for index, expected in enumerate(self.checksums):
                    data = file.read(chunk)
                    report(len(data))
                    if hashlib.sha256(data).hexdigest() != expected:
                        found.append(index)
        except OSError as error:
            raise TableError(f"{self.path}: {error.strerror or error}") from None
        return found


def packed_files(folder: str | Path, layer_ids: Iterable[int]) -> dict[int, PackedFile]:
    """The packed tables of these layers in ``folder``; raises :class:`TableError` for one that is missing."""
    return {layer_id: PackedFile.open(packed_path(folder, layer_id)) for layer_id in layer_ids}


def sidecar_path(path: Path) -> Path:
    """The JSON beside a packed file."""
    return path.with_name(path.name + ".json")


def _parse(path: Path, beside: Path, held: Any) -> PackedFile:
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        found = held.get("format") if isinstance(held, dict) else type(held).__name__
        raise TableError(f"{beside}: format is {found!r}; {FORMAT!r} is needed ({_NEED})")
    try:
        numbers = {key: held[key] for key in ("layer_id", "rows", "head_dim", "chunk_rows")}
        packed = PackedFile(path, **numbers, checksums=tuple(held["checksums"]), source=held["source"])
    except (KeyError, TypeError) as error:
        raise TableError(f"{beside}: {error}; {_NEED}") from None
    if not all(type(n) is int and n >= least for n, least in zip(numbers.values(), (0, 1, 32, 1), strict=True)):
        raise TableError(f"{beside}: has {numbers}; whole numbers above 0 are needed ({_NEED})")
    if len(packed.checksums) != -(-packed.rows // packed.chunk_rows) or packed.fingerprint != held.get("fingerprint"):
        raise TableError(f"{beside}: its checksums and its fingerprint don't agree; {_NEED}")
    return packed
