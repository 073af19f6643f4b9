"""Checkpoint: a Hugging Face folder, and where in it each Engram tensor lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engram_core.checkpoint.layers import LayerTensors, check_layers, layer_tensors
from engram_core.checkpoint.shard import ShardFile, Stored
from engram_core.config import EngramConfig
from engram_core.errors import CheckpointError, InvalidArgumentError
from engram_core.names import parse_name

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """``folder`` holds ``config.json``, ``model.safetensors.index.json`` and shards, or one ``model.safetensors``.

    ``config``: of its Engram layers; ``files``: the shard of each Engram tensor, by the checkpoint's name for it.
    Opening reads those two JSON files; shards are read by :meth:`layers`, and only those that it needs.
    """

    folder: Path
    config: EngramConfig
    files: dict[str, Path]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """``path``: the folder, or its single ``.safetensors`` file.

        Raises :class:`ConfigError` and :class:`CheckpointError`, one line with the file and the key.
        """
        path = Path(path)
        folder = path.parent if path.is_file() else path
        if not folder.is_dir():
            raise CheckpointError(f"{path}: no such folder; a Hugging Face checkpoint is needed")
        config = EngramConfig.from_hf(folder)
        if path.is_file():
            return cls(folder, config, _single(path))
        if (folder / INDEX).exists():
            return cls(folder, config, _index(folder / INDEX))
        if (folder / SINGLE).exists():
            return cls(folder, config, _single(folder / SINGLE))
        raise CheckpointError(f"{folder}: holds neither {INDEX} nor {SINGLE}; one of them is needed")

    def layers(self, layer_ids: Sequence[int] | None = None, tables: bool = True) -> dict[int, LayerTensors]:
        """The tensors of these Engram layers (default: all), checked whole against the configuration.

        Reads the header of every shard that holds one of them, and of no other. ``tables``: False where the rows come
        from elsewhere (a packed file), so that they need not be there. Raises :class:`CheckpointError` for what is
        missing, truncated, or of the wrong dtype, shape or number, naming the file, the tensor, what was found and
        what is needed.
        """
        wanted = self.config.layer_ids if layer_ids is None else tuple(layer_ids)
        if unknown := [i for i in wanted if i not in self.config.layer_ids]:
            raise InvalidArgumentError(
                "layer_ids", f"{unknown}", f"Engram layers of the model, {list(self.config.layer_ids)}"
            )
        stored = self._stored(wanted, tables)
        found = {i: layer_tensors(self.folder, i, stored.get(i, []), self.config, tables) for i in wanted}
        check_layers(self.config, found)
        return found

    def _stored(self, wanted: Sequence[int], tables: bool) -> dict[int, list[Stored]]:
        shards: dict[Path, ShardFile] = {}
        found: dict[int, list[Stored]] = {}
        for name, file in self.files.items():
            parsed = parse_name(name)
            if parsed is None or parsed.layer_id not in wanted or (not tables and parsed.is_table):
                continue
            if file not in shards:
                shards[file] = ShardFile.read(file)
            if name not in shards[file].tensors:
                raise CheckpointError(f"{file}: {name}: not in this shard; {INDEX} says that it is")
            found.setdefault(parsed.layer_id, []).append(shards[file].tensors[name])
        return found


def _single(path: Path) -> dict[str, Path]:
    return {name: path for name in ShardFile.read(path).tensors if parse_name(name) is not None}


def _index(path: Path) -> dict[str, Path]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; a readable index is needed") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    weight_map = loaded.get("weight_map") if isinstance(loaded, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: the key weight_map is missing; an object of tensor names and files is needed")
    files = {}
    for name, file in weight_map.items():
        if parse_name(name) is None:
            continue
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path}: weight_map: {name} is {file!r}; a file beside the index is needed")
        files[name] = path.parent / file
    return files
