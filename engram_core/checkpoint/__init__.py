"""Checkpoints: a Hugging Face folder's Engram tensors, read in pieces, checked before anything is allocated.

``folder``: which tensor lies where; ``layers``: whether they are what the configuration asks for; ``pieces``: reading;
``load``: into a memory; ``pack`` and ``packed``: the file that placement "file" maps; ``write``: a small checkpoint.
"""

from engram_core.checkpoint.folder import Checkpoint
from engram_core.checkpoint.layers import LayerTensors, check_layers
from engram_core.checkpoint.load import load_checkpoint
from engram_core.checkpoint.pack import pack_table
from engram_core.checkpoint.packed import PackedFile, packed_files
from engram_core.checkpoint.write import write_checkpoint

__all__ = [
    "Checkpoint",
    "LayerTensors",
    "PackedFile",
    "check_layers",
    "load_checkpoint",
    "pack_table",
    "packed_files",
    "write_checkpoint",
]
