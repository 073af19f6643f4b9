"""Every synchronisation of the chain, taken out (contract, section 7): faults that only a GPU shows.

Each is one wait, one event or one use noted; its cases delay what was waited for, so that what no longer waits is seen.
Those that no case can show are in ``order.py``.
"""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_layer = "engram_core.layer:Engram."
_chains = "engram_core.gpu.prefetch:SideStreamPrefetch."
_gather = "engram_core.gpu.gather:CpuGather."
_end = "engram_core.step:EngramStep.end"
_m = partial(Mutant, area="graphs")
# A capture that fails leaves a process in which little can be trusted.
_capture = partial(Mutant, area="graphs", apart=True)

MUTANTS = (
    _m(
        name="lookup-waits-for-nothing",
        function=_layer + "prepare",
        says="a look-up waits neither for its ids nor for earlier readers of the row buffer",
        old="stream.wait_event(begun)",
        new="pass",
        cases=(
            "stream-late-inputs-one",
            "stream-late-inputs-three",
            "stream-late-inputs-plain",
            "stream-rows-in-use-device",
        ),
    ),
    _m(
        name="lookup-over-late-chain",
        function=_layer + "prepare",
        says="a look-up does not wait for a chain that still reads the row buffer",
        old="(stream or torch.accelerator.current_stream(self.backend.device)).wait_event(self.reading)",
        new="pass",
        cases=("stream-next-lookup",),
    ),
    _m(
        name="lookup-never-ready",
        function=_layer + "prepare",
        says="the event that says that rows are there is never recorded",
        old="ready.record(stream)",
        new="pass",
        cases=("stream-late-lookup", "stream-late-lookup-plain"),
    ),
    _m(
        name="lookup-ids-given-away",
        function=_layer + "prepare",
        says="the allocator is not told that ids are read on the look-ups' stream",
        old="wanted.record_stream(stream)",
        new="pass",
        cases=("stream-freed-ids",),
    ),
    _m(
        name="rows-taken-too-early",
        function=_layer + "take_rows",
        says="rows are taken without waiting for their look-up",
        old="self.await_rows()",
        new="pass",
        cases=("stream-late-lookup", "stream-late-lookup-plain"),
    ),
    _m(
        name="chain-waits-for-lookup-alone",
        function=_chains + "start",
        says="a chain waits for its look-up, and not for what the current stream holds besides",
        old="self._follow()",
        new="pass",
        cases=("stream-late-weights", "stream-late-gate"),
    ),
    _m(
        name="deferred-chain-waits-for-lookup-alone",
        function=_chains + "start_layer",
        says="a deferred chain waits for its look-up, and not for what the current stream holds when it is started",
        old="self._follow()",
        new="pass",
        cases=("stream-late-weights-deferred", "stream-late-gate-deferred"),
    ),
    _m(
        name="chain-never-done",
        function=_chains + "_record",
        says="the event that says that a chain is done is never recorded",
        old="self._side.record_event()",
        new="torch.Event(self._device)",
        cases=(
            "stream-late-chains",
            "stream-late-chains-unwaited",
            "stream-late-chains-deferred",
            "stream-late-lookup",
            "stream-next-lookup",
        ),
    ),
    _m(
        name="chain-not-waited-for",
        function=_chains + "wait",
        says="wait does not wait",
        old="torch.accelerator.current_stream(self._device).wait_event(event)",
        new="pass",
        cases=(
            "stream-late-chains",
            "stream-late-chains-unwaited",
            "stream-late-chains-deferred",
            "stream-late-lookup",
        ),
    ),
    _m(
        name="chain-waited-for-by-the-engine-alone",
        function=_chains + "apply",
        says="apply trusts that the engine called wait",
        old="self.wait(layer)",
        new="pass",
        cases=("stream-late-chains-unwaited",),
    ),
    _m(
        name="copies-wait-for-nothing",
        function=_gather + "__call__",
        says="copies of rows gathered on the CPU do not wait for earlier readers of the row buffer",
        old="self._copies.wait_stream(current)",
        new="pass",
        cases=("stream-rows-in-use-host", "stream-rows-in-use-file"),
    ),
    _m(
        name="copies-not-waited-for",
        function=_gather + "__call__",
        says="a look-up is ready before rows gathered on the CPU are there",
        old="current.wait_stream(self._copies)",
        new="pass",
        cases=("stream-late-copies-host", "stream-late-copies-file"),
    ),
    _m(
        name="copies-share-staging",
        function=_gather + "_gather",
        says="one page-locked buffer is filled again and again, whether or not it was copied",
        old='gathered = torch.empty(tokens * columns, width, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)',
        new="gathered = self.__dict__.setdefault((tokens, width), torch.empty(tokens * columns, width, "
        'dtype=torch.uint8, device="cpu", pin_memory=self._pinned))',
        cases=("stream-rows-under-way-host", "stream-rows-under-way-file"),
    ),
    _m(
        name="reload-under-lookups",
        function="engram_core.gpu.table:GpuTable.load",
        says="rows in host memory are written while look-ups that were enqueued before still read them",
        old="torch.cuda.synchronize(self.device)",
        new="pass",
        cases=("stream-reload-host",),
    ),
    _m(
        name="hits-read-too-early",
        function="engram_core.gpu.hot:HotCache.hits",
        says="hits of the cache are read before look-ups on another stream have counted theirs",
        old="self._settle()",
        new="pass",
        cases=("stream-hits",),
    ),
    _capture(
        name="join-does-not-wait",
        function=_chains + "join",
        says="join waits for no chain",
        old="self.wait(layer)",
        new="pass",
        cases=("graph-no-layer", "graph-skipped-last"),
    ),
    _capture(
        name="end-without-join",
        function=_end,
        says="a step's end does not join the chains",
        old="memory.prefetch.join()",
        new="pass",
        cases=("graph-no-layer", "graph-skipped-last"),
    ),
    _capture(
        name="end-without-lookups",
        function=_end,
        says="a step's end does not join the look-ups that no layer took",
        old="layer.await_rows()",
        new="pass",
        cases=("graph-no-layer-plain", "graph-skipped-last-plain"),
    ),
    _capture(
        name="await-does-not-wait",
        function=_layer + "await_rows",
        says="nobody waits for a look-up",
        old="torch.accelerator.current_stream(self.backend.device).wait_event(self.staged.ready)",
        new="pass",
        cases=("graph-no-layer-plain", "stream-late-lookup", "stream-late-lookup-plain"),
    ),
)
