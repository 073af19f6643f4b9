"""TokenMap: raw token ids to compressed ids, so that "The", " the" and "THE" hash alike.

A right size does not prove a right map, so a map has a fingerprint: the SHA-256 of its int32 little-endian bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engram_core.errors import InvalidArgumentError, TokenMapError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

# A private-use character that no text holds: it keeps a lone space from being stripped (docs/contract.md, "Token map").
_SPACE_GUARD = "\ue000"
_REPLACEMENT = "\ufffd"


class TokenMap:
    """``ids``: int32 ``[V]``, the compressed id of every raw token id; ``pad_id``: that of ``pad_token_id``.

    ``size``: number of compressed ids (the largest plus one). Frozen by convention: a hasher uploads it once.
    Raises :class:`InvalidArgumentError` for ids that are not integers from 0 on, or a pad outside them.
    """

    def __init__(self, ids: torch.Tensor | np.ndarray[Any, Any] | Sequence[int], pad_token_id: int) -> None:
        values = torch.as_tensor(ids).detach().cpu()
        if values.dim() != 1 or values.numel() == 0 or values.is_floating_point() or values.dtype == torch.bool:
            raise InvalidArgumentError("ids", f"{list(values.shape)} {values.dtype}", "[V] integers, V at least 1")
        wide = values.to(torch.int64)
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= 2**31:
            raise InvalidArgumentError("ids", f"values from {low} to {high}", "compressed ids from 0 on, below 2**31")
        if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int) or not 0 <= pad_token_id < wide.numel():
            raise InvalidArgumentError("pad_token_id", repr(pad_token_id), f"a raw token id in [0, {wide.numel()})")
        self.ids = wide.to(torch.int32).clone()
        self.pad_token_id = pad_token_id
        self.size = high + 1
        self.pad_id = int(self.ids[pad_token_id])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the int32 little-endian bytes of ``ids``."""
        return hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()

    def __len__(self) -> int:
        return self.ids.numel()

    def __repr__(self) -> str:
        return f"TokenMap({len(self)} ids -> {self.size}, pad_id={self.pad_id}, {self.fingerprint[:12]})"

    @classmethod
    def identity(cls, size: int, pad_token_id: int) -> TokenMap:
        """Every raw id is its own compressed id."""
        return cls(torch.arange(size, dtype=torch.int32), pad_token_id)

    @classmethod
    def from_tokenizer(cls, tokenizer: str | Path | Tokenizer, pad_token_id: int) -> TokenMap:
        """Build the map from a ``tokenizer.json`` (the file or its folder) or a ``tokenizers.Tokenizer``.

        Raises :class:`TokenMapError` for a file that is missing or no tokenizer.
        """
        loaded = load_tokenizer(tokenizer)
        normalizer = _normalizer()
        count = loaded.get_vocab_size(with_added_tokens=True)
        texts = loaded.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
        seen: dict[str | None, int] = {}
        ids = np.empty(count, dtype=np.int32)
        for i, text in enumerate(texts):
            # A piece of a UTF-8 sequence has no text of its own.
            key = loaded.id_to_token(i) if _REPLACEMENT in text else normalizer.normalize_str(text) or text
            ids[i] = seen.setdefault(key, len(seen))
        return cls(ids, pad_token_id)

    def save(self, path: str | Path) -> None:
        """Write the map as a safetensors file, with its fingerprint."""
        from safetensors.torch import save_file

        metadata = {"pad_token_id": str(self.pad_token_id), "fingerprint": self.fingerprint}
        save_file({"ids": self.ids}, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> TokenMap:
        """Read what :meth:`save` wrote; raises :class:`TokenMapError` if it is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                result = cls(file.get_tensor("ids"), int(metadata["pad_token_id"]))
        except (OSError, SafetensorError) as error:
            raise TokenMapError(f"{path}: not a token map file ({error})") from None
        except KeyError as error:
            raise TokenMapError(f"{path}: not a token map file ({error} is missing)") from None
        if result.fingerprint != metadata.get("fingerprint"):
            raise TokenMapError(
                f"{path}: the ids have fingerprint {result.fingerprint}, the file says {metadata.get('fingerprint')}"
            )
        return result


def load_tokenizer(source: str | Path | Tokenizer) -> Tokenizer:
    """A ``tokenizers.Tokenizer`` from itself, a transformers fast tokenizer, a ``tokenizer.json`` or its folder."""
    from tokenizers import Tokenizer

    if isinstance(source, Tokenizer):
        return source
    backend = getattr(source, "backend_tokenizer", None)  # transformers' fast tokenizers wrap one
    if isinstance(backend, Tokenizer):
        return backend
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise TokenMapError(f"{path}: no such file; a tokenizer.json is needed")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenMapError(f"{path}: not a tokenizer.json ({error})") from None


def _normalizer() -> Normalizer:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _SPACE_GUARD),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_GUARD, " "),
        ]
    )
