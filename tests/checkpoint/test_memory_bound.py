"""Memory beyond the table: bounded while loading and packing, however large the table is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_config

from engram_core import EngramConfig
from engram_core.checkpoint import write_checkpoint

# VmHWM is the peak of this program alone: ru_maxrss would count the parent's memory before exec.
PEAK = """
import re, sys
import torch
from engram_core import EngramMemory, TokenMap, get_backend
from engram_core.checkpoint import Checkpoint, pack_table

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

folder, out, what = sys.argv[1:]
backend, tokens = get_backend("reference", "cpu"), TokenMap.identity(64, 2)
pack_table  # everything is imported before the first reading
before = status("VmRSS")
if what == "load":
    memory = EngramMemory.from_pretrained(folder, tokens, backend=backend, max_tokens=8, placement="host")
    held = memory.layers[1].table.packed.numel()
else:
    pack_table(Checkpoint.open(folder).layers()[1], out)
    held = 0
print(status("VmHWM") - before - held)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngramConfig]:
    """A table of 528 MB, 15 pieces."""
    config: EngramConfig = tiny_config(layer_ids=(1,), vocab_size=500_000, head_dim=256)
    return write_checkpoint(tmp_path_factory.mktemp("large") / "model", config), config


@pytest.mark.parametrize("what", ["load", "pack"])
def test_the_peak_beyond_the_table_is_bounded(large: tuple[Path, EngramConfig], tmp_path: Path, what: str) -> None:
    folder, config = large
    table = config.num_embeddings[0] * 264
    assert table > 500 * 2**20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PEAK, str(folder), str(tmp_path), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Four pieces in flight and one being packed are 170 MB; the promise is 1 GiB.
    assert int(done.stdout) < 300 * 2**20
