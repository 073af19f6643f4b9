"""HotRows: how often each row of a table was looked up in some text, most frequent first, and the file that holds it.

Text repeats itself, so a small part of a table serves much of it. What a cache in device memory is filled with is
chosen from these counts, and nothing else follows from them: wrong or old counts cost speed, never a result.

Row ids mean something only under one hash, so a file carries a fingerprint of everything that the ids depend on.
:class:`engram_core.hot_count.RowCounter` makes the counts, ``engram-core hot-rows`` makes the file from text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engram_core.checks import INDEX_DTYPES, check_tensor, describe
from engram_core.errors import InvalidArgumentError, TableError

if TYPE_CHECKING:
    from engram_core.layout import HashLayout
    from engram_core.tokens import TokenMap

FORMAT: Final = "engram-hot-rows-1"
_NEED: Final = "engram-core hot-rows makes it anew"
_INT32_MAX: Final = 2**31 - 1


def hashing_fingerprint(layout: HashLayout, token_map: TokenMap) -> str:
    """SHA-256 (hex) of all that a row id depends on: primes, offsets, multipliers, and the token map with its pad."""
    parts = {
        "layer_ids": layout.layer_ids,
        "primes": layout.primes,
        "offsets": layout.offsets,
        "multipliers": layout.multipliers,
        "token_map": token_map.fingerprint,
        "pad_id": token_map.pad_id,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)  # tensors compare element by element
class HotRows:
    """Rows of some layers of one model, most frequent first.

    ``ids``: for each layer id the rows ``[N]``, int32 or int64 on the CPU, each once, by descending count and, where
    that is equal, ascending id; ``counts``: for the same layers how often each was looked up, ``[N]`` int64, at least
    1; ``tokens``: tokens counted, each of them C look-ups a layer, those of rows that are not listed among them;
    ``fingerprint``: :func:`hashing_fingerprint`. Raises :class:`InvalidArgumentError` for anything else.
    """

    ids: Mapping[int, torch.Tensor]
    counts: Mapping[int, torch.Tensor]
    tokens: int
    fingerprint: str

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise InvalidArgumentError("tokens", describe(self.tokens), "an int of at least 0")
        if not self.ids or set(self.ids) != set(self.counts):
            raise InvalidArgumentError(
                "counts", f"layers {sorted(self.counts)}", f"at least one, and those of ids, {sorted(self.ids)}"
            )
        object.__setattr__(self, "ids", dict(self.ids))
        object.__setattr__(self, "counts", dict(self.counts))
        for layer_id, ids in self.ids.items():
            check_tensor(f"ids[{layer_id}]", ids, ("N",), INDEX_DTYPES, torch.device("cpu"))
            counts = self.counts[layer_id]
            check_tensor(f"counts[{layer_id}]", counts, ids.shape, (torch.int64,), torch.device("cpu"))
            _check_order(layer_id, ids, counts)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that were counted, in ascending order."""
        return tuple(sorted(self.ids))

    def __repr__(self) -> str:
        rows = ", ".join(f"{layer_id}: {self.ids[layer_id].numel()} rows" for layer_id in self.layer_ids)
        return f"HotRows({rows}; {self.tokens} tokens, {self.fingerprint[:12]})"

    def check(self, layout: HashLayout, token_map: TokenMap) -> None:
        """Raises :class:`TableError` if the ids were made by another hash: another model, or another tokenizer."""
        needed = hashing_fingerprint(layout, token_map)
        if self.fingerprint != needed:
            raise TableError(
                f"hot rows: were counted for another model or tokenizer (fingerprint {self.fingerprint[:16]}, this "
                f"model with this token map has {needed[:16]}); {_NEED}"
            )
        for layer_id, ids in self.ids.items():
            # Of the right fingerprint and yet outside the table: never to be given to a kernel that reads there.
            rows = layout.rows[layout.index(layer_id)] if layer_id in layout.layer_ids else 0
            if ids.numel() and int(ids.max()) >= rows:
                raise TableError(f"hot rows: layer {layer_id} has row {int(ids.max())} of {rows}; {_NEED}")

    def most(self, layer_id: int, rows: int) -> torch.Tensor:
        """Ids ``[at most rows]`` of the most frequent rows of a layer, a view of ``ids``.

        Raises :class:`InvalidArgumentError` for a layer that was not counted, or a negative number.
        """
        if layer_id not in self.ids:
            raise InvalidArgumentError("layer_id", repr(layer_id), f"a layer that was counted, {list(self.layer_ids)}")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise InvalidArgumentError("rows", describe(rows), "an int of at least 0")
        return self.ids[layer_id][:rows]

    def cut(self, rows: int) -> HotRows:
        """The same with only the ``rows`` most frequent rows of each layer."""
        return replace(
            self,
            ids={layer_id: self.most(layer_id, rows) for layer_id in self.ids},
            counts={layer_id: counts[:rows] for layer_id, counts in self.counts.items()},
        )

    def served(self, other: HotRows, layer_id: int, rows: int) -> int:
        """How many look-ups that ``other`` counted the ``rows`` most frequent rows of this one would serve.

        Raises :class:`InvalidArgumentError` if the two belong to different models.
        """
        if self.fingerprint != other.fingerprint:
            raise InvalidArgumentError("other", repr(other), f"counts of the same model, {self.fingerprint[:12]}")
        found = torch.isin(other.most(layer_id, other.ids[layer_id].numel()), self.most(layer_id, rows))
        return int(other.counts[layer_id][found].sum())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: under a temporary name first, so that what has the name ``path`` is whole.

        A file that is there is replaced. Raises :class:`TableError` where that can't be written.
        """
        from safetensors.torch import save

        path = Path(path)
        tensors = {f"{layer_id}.ids": ids.contiguous() for layer_id, ids in self.ids.items()}
        for layer_id, counts in self.counts.items():
            # The first is the largest: most files are a third smaller in int32.
            narrow = counts.numel() == 0 or int(counts[0]) <= _INT32_MAX
            tensors[f"{layer_id}.counts"] = counts.to(torch.int32) if narrow else counts.contiguous()
        metadata = {"format": FORMAT, "fingerprint": self.fingerprint, "tokens": str(self.tokens)}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            # Not save_file: it makes files that nobody but their owner may read, whatever the umask says.
            with open(partial, "wb") as file:
                file.write(save(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            raise TableError(f"{path}: can't be written ({error.strerror or error})") from None
        finally:
            with contextlib.suppress(OSError):  # where it could not be made, it often can't be looked for either
                partial.unlink()  # interrupted, or a full disk

    @classmethod
    def load(cls, path: str | Path) -> HotRows:
        """Read what :meth:`save` wrote; :meth:`check` then says whether it is this model's.

        Raises :class:`TableError` that names the file if it is missing, damaged or of another format.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except OSError as error:
            raise TableError(f"{path}: {error.strerror or error}; a file of hot rows is needed ({_NEED})") from None
        except SafetensorError as error:
            raise TableError(f"{path}: not a file of hot rows, or cut off ({error}); {_NEED}") from None
        if metadata.get("format") != FORMAT:
            raise TableError(f"{path}: format is {metadata.get('format')!r}; {FORMAT!r} is needed ({_NEED})")
        try:
            layers = [int(key.removesuffix(".ids")) for key in held if key.endswith(".ids")]
            return cls(
                ids={i: held[f"{i}.ids"] for i in layers},
                counts={i: held[f"{i}.counts"].to(torch.int64) for i in layers},
                tokens=int(metadata["tokens"]),
                fingerprint=metadata["fingerprint"],
            )
        except KeyError as error:
            raise TableError(f"{path}: damaged ({error} is missing); {_NEED}") from None
        except ValueError as error:  # InvalidArgumentError among them
            raise TableError(f"{path}: damaged ({error}); {_NEED}") from None


def _check_order(layer_id: int, ids: torch.Tensor, counts: torch.Tensor) -> None:
    if ids.numel() == 0:
        return
    if int(ids.min()) < 0 or int(counts.min()) < 1:
        raise InvalidArgumentError(
            f"ids[{layer_id}]",
            f"ids from {int(ids.min())}, counts from {int(counts.min())}",
            "ids from 0, counts from 1",
        )
    falls, same = counts[1:] < counts[:-1], counts[1:] == counts[:-1]
    if not bool((falls | (same & (ids[1:] > ids[:-1]))).all()):
        raise InvalidArgumentError(f"ids[{layer_id}]", "another order", "descending counts, then ascending ids")
    ordered = ids.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise InvalidArgumentError(f"ids[{layer_id}]", "an id twice", "each id once")
