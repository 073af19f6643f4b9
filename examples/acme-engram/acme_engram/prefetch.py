"""The WKV ahead of its layer, in a thread: the decoder's own work and the chains run side by side.

One thread for each Prefetch: chains run in the order of their layers, and the first one needed is the first one done.
What starts, what holds and what is refused is the core's InlinePrefetch; here is only where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from engram_core.layer import Engram
from engram_core.prefetch import InlinePrefetch


class ThreadPrefetch(InlinePrefetch):
    """Chains of ``layers``, of at most ``max_rows`` tokens, each into a buffer of its own."""

    def __init__(self, layers: Sequence[Engram], max_rows: int) -> None:
        """Raises :class:`UnsupportedConfigError` for a layer whose WKV can't run ahead, with all reasons."""
        super().__init__(layers, max_rows)
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="acme-ahead")

    def start(self, num_tokens: int) -> None:
        self._survive_fork()
        super().start(num_tokens)

    def project(self, layer: Engram, rows: torch.Tensor, out: torch.Tensor) -> Future[torch.Tensor]:
        self._survive_fork()  # deferred before the fork, it is started after it
        # An earlier step's chain that still runs is before this one in the thread's queue: it writes its buffer first.
        # A copy: the next step may look up into the layer's buffer while this chain still waits for its turn.
        return self._thread.submit(layer.project, rows.clone(), out, ahead=True)

    def result(self, kv: Future[torch.Tensor]) -> torch.Tensor:
        return kv.result()  # raises here what the chain raised there

    def started(self, layer: Engram) -> bool:
        self._survive_fork()
        return super().started(layer)

    def wait(self, layer: Engram) -> None:
        if self.started(layer):
            self.result(self.promised(layer))

    def join(self) -> None:
        self._survive_fork()
        super().join()

    def finish(self, promised: Sequence[Future[torch.Tensor]]) -> None:
        wait(promised)
        for kv in promised:
            kv.result()  # a failure is told, even where no layer asked for the result

    def _survive_fork(self) -> None:
        # A forked child has neither its parent's thread nor the results that it would have brought.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="acme-ahead")
            self.forget()
