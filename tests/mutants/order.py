"""Waits, and one order of writes, that no case can show to be missing: the calls are watched.

What would go wrong is over in microseconds, or needs a copy that fails: a look-up on another stream that is between a
row's bit and the row while the cache is replaced; one that comes while the last of its bits are set; memory that is
unregistered under a kernel (whether the driver waits for that itself is its own affair, and where it does not, the
process is lost). So each check runs on the CPU, on what stands for a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from mutants.model import Mutant

_m = partial(Mutant, area="graphs", cases=())


def cache_is_replaced_while_nothing_runs() -> None:
    """``HotCache.replace`` waits before its first write and after its last."""
    from engram_core.gpu.hot import HotCache

    packed = torch.arange(200 * 66, dtype=torch.int32).to(torch.uint8).view(200, 66)
    cache = HotCache(packed, 4000, torch.device("cpu"))
    cache.replace(torch.arange(0, 50))

    def state() -> list[torch.Tensor]:
        return [part.clone() for part in (cache.set.rows, cache.set.bits, cache.set.ranks)]

    before, seen = state(), []
    with mock.patch.object(HotCache, "_settle", side_effect=lambda: seen.append(state())):
        cache.replace(torch.arange(60, 130, 2))
    after = state()
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert seen, "replace waits for nothing"
    assert all(map(torch.equal, seen[0], before)), "the cache was written before replace waited"
    assert all(map(torch.equal, seen[-1], after)), "the cache was written after replace waited"


def cache_is_empty_where_a_copy_fails() -> None:
    """``HotCache.replace`` marks no row before all are there: those of before are gone by then."""
    from engram_core.gpu.hot import HotCache

    cache = HotCache(torch.zeros(200, 66, dtype=torch.uint8), 4000, torch.device("cpu"))
    cache.replace(torch.arange(0, 50))
    with mock.patch.object(HotCache, "refresh", side_effect=RuntimeError), contextlib.suppress(RuntimeError):
        cache.replace(torch.arange(60, 130, 2))
    assert not cache.set.bits.any(), "rows are marked that are not cached"


def memory_is_unregistered_when_nothing_reads_it() -> None:
    """``Registration`` waits for its own device, then gives the memory back."""
    from engram_core.gpu.runtime import Registration

    calls: list[Any] = []
    runtime = mock.Mock()
    runtime.unregister.side_effect = lambda address: calls.append("unregister")
    with (
        mock.patch("engram_core.gpu.runtime.is_capturing", return_value=False),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "synchronize", side_effect=calls.append),
    ):
        Registration(runtime, torch.zeros(4), 0)._close(torch.device("cuda", 1))
    assert calls == [torch.device("cuda", 1), "unregister"], f"calls: {calls}"


# Of the cache's two calls that wait, the beginning of its comment tells which is meant.
CHECKED: tuple[tuple[Mutant, Callable[[], None]], ...] = (
    (
        _m(
            name="cache-replaced-under-lookups",
            function="engram_core.gpu.hot:HotCache.replace",
            says="the cache is replaced while look-ups may read it",
            old="self._settle()  # no look-up",
            new="pass  # no look-up",
        ),
        cache_is_replaced_while_nothing_runs,
    ),
    (
        _m(
            name="cache-used-while-replaced",
            function="engram_core.gpu.hot:HotCache.replace",
            says="look-ups may read the cache while it is still being written",
            old="self._settle()  # none that",
            new="pass  # none that",
        ),
        cache_is_replaced_while_nothing_runs,
    ),
    (
        _m(
            name="cache-half-replaced",
            function="engram_core.gpu.hot:HotCache.replace",
            says="rows that were cached before stay marked while others are copied over them",
            old="self.set.bits.zero_()",
            new="pass",
        ),
        cache_is_empty_where_a_copy_fails,
    ),
    (
        _m(
            name="memory-unregistered-under-lookups",
            function="engram_core.gpu.runtime:Registration._close",
            says="host memory is given back while kernels may read it",
            old="torch.cuda.synchronize(device)",
            new="pass",
        ),
        memory_is_unregistered_when_nothing_reads_it,
    ),
)
