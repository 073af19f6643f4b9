"""What only a fresh process can show: nothing heavy is imported, and discovery leaves a fork usable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engram_core.registry import get_backend


def python(source: str, *path: str, **env: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")}
    plain["PYTHONPATH"] = os.pathsep.join([*path, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", source], env={**plain, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy():
    out = python(
        "import sys, time; begin = time.perf_counter(); import engram_core; spent = time.perf_counter() - begin\n"
        "heavy = [m for m in ('torch', 'triton', 'pydantic', 'numpy', 'pluggy', 'safetensors') if m in sys.modules]\n"
        "print(f'import engram_core: {1e3 * spent:.1f} ms'); print(heavy)"
    )
    print(out)
    assert out.splitlines()[1] == "[]"


def test_importing_the_registry_and_the_plugins_loads_neither_torch_nor_triton():
    out = python(
        "import sys, engram_core.registry, engram_reference.plugin, engram_nvidia.plugin, engram_rocm.plugin\n"
        "engram_core.get_backend, engram_core.list_backends, engram_core.use_backend, engram_core.hookimpl\n"
        "print([m for m in ('torch', 'triton', 'pydantic') if m in sys.modules])"
    )
    assert out.strip() == "[]"


def test_no_torch_for_a_name_that_is_not_installed(site):
    site.backend("acme")
    out = python(
        "import sys, importlib.metadata as m\n"
        "from engram_core import _discovery\n"
        "_discovery.distributions = lambda: m.distributions(path=sys.path[1:2])\n"
        "from engram_core.registry import get_backend\n"
        "from engram_core.errors import UnknownBackendError\n"
        "try: get_backend('acne')\n"
        "except UnknownBackendError as exc: print(\"did you mean 'acme'?\" in str(exc), 'torch' in sys.modules)",
        str(site.root),
    )
    assert out.strip() == "True False"


FORK = """
import multiprocessing, sys, torch
from engram_core import _discovery
from engram_core.registry import list_backends, survey

def child(queue):
    # Raises "Cannot re-initialize CUDA in forked subprocess" where the parent has initialised it.
    where = "cuda" if torch.cuda.is_available() else "cpu"
    queue.put((float(torch.ones(2, device=where).sum()), [d.name for d in list_backends()]))

before = [d.name for d in list_backends()]
survey(device="cpu")
assert not torch.cuda.is_initialized()
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
total, after = queue.get(timeout=60)
process.join()
assert (total, after) == (2.0, before), (total, after, before)
assert {"nvidia", "rocm", "reference"} <= set(before), before
print("forked", process.exitcode)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_fork_after_discovery_can_use_the_device(site):
    site.core()
    assert python(FORK, str(site.root)).strip() == "forked 0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_child_makes_a_backend_of_its_own(site):
    """The parent's object stays the parent's, and a lock held by another thread at the fork does not stop the child."""
    site.backend("acme")
    source = (
        "import importlib.metadata as m, os, sys\n"
        "from engram_core import _discovery, registry\n"
        "_discovery.distributions = lambda: m.distributions(path=sys.path[1:2])\n"
        "mine = registry.get_backend('acme')\n"
        "import threading\n"
        "held, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with registry._creating: held.set(); done.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if registry.get_backend('acme') is not mine else 1)\n"
        "status = os.waitpid(pid, 0)[1]; done.set(); thread.join()\n"
        "print(status, registry.get_backend('acme') is mine)"
    )
    assert python(source, str(site.root)).strip() == "0 True"


def test_threads_that_ask_at_once_get_one_object(site):
    from concurrent.futures import ThreadPoolExecutor

    site.backend("acme", body="def __init__(self, device): import time; time.sleep(0.05); super().__init__(device)")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: get_backend("acme"), range(8)))
    assert len({id(backend) for backend in made}) == 1
