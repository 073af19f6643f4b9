"""Engram: one layer. Rows of its table, the WKV projection of them, and the gate into the residual streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engram_core.backend import EngramBackend, GateWeights, Wkv
from engram_core.checks import INDEX_DTYPES, check_tensor, describe
from engram_core.errors import InvalidArgumentError, StepError
from engram_core.exchange import RowExchange, Window, window
from engram_core.parallel import Parallel
from engram_core.table import EngramTable


@dataclass
class StagedRows:
    """Looked-up rows of one step, for a chain to take.

    ``rows``: a view of the layer's persistent buffer (a stable address); ``num_tokens``: T of the batch; ``slot``:
    tokens a data-parallel rank; ``ready``: recorded when the rows are there, None: in line; ``table_version``: of the
    table read.
    """

    rows: torch.Tensor
    num_tokens: int
    slot: int
    ready: torch.Event | None
    table_version: int


class Engram(nn.Module):
    """One Engram layer of a model on one backend.

    ``forward(hidden_states [T, H, dim] bf16, hash_ids [T, C], token_mask [T] bool or None) -> [T, H, dim]``. Under
    sequence parallelism ``hidden_states`` are this rank's window, ``hash_ids`` and ``token_mask`` the whole batch.
    """

    def __init__(
        self,
        layer_id: int,
        table: EngramTable,
        wkv: Wkv,
        gate: GateWeights,
        backend: EngramBackend,
        max_tokens: int = 8192,
    ) -> None:
        super().__init__()
        if (gate.hc_mult, gate.dim) != (wkv.spec.hc_mult, wkv.spec.dim):
            raise InvalidArgumentError(
                "gate", f"weights [{gate.hc_mult}, {gate.dim}]", f"[{wkv.spec.hc_mult}, {wkv.spec.dim}], as the wkv"
            )
        if table.spec.columns * table.spec.head_dim != wkv.spec.in_features:
            raise InvalidArgumentError(
                "table",
                f"{table.spec.columns} columns of {table.spec.head_dim} values",
                f"{wkv.spec.in_features} values a token, as the wkv",
            )
        self.layer_id = layer_id
        self.table = table
        self.wkv = wkv
        self.gate = gate
        self.backend = backend
        self.max_tokens = max_tokens
        self.parallel: Parallel = wkv.parallel
        self.staged: StagedRows | None = None
        self.reading: torch.Event | None = None
        """Recorded when a chain on another stream has read :attr:`staged`'s buffer; None: nothing to wait for."""
        self._exchange = RowExchange(table.spec.exchange, table.shard, table.spec.columns)
        width = table.spec.width if wkv.accepts_packed else table.spec.head_dim
        self._buffer = torch.empty(
            max_tokens * table.spec.exchange.data_size,
            table.shard.columns,
            width,
            dtype=torch.uint8 if wkv.accepts_packed else torch.bfloat16,
            device=backend.device,
        )

    def prepare(
        self, hash_ids: torch.Tensor, slot_tokens: int | None = None, host_ids: torch.Tensor | None = None
    ) -> None:
        """Look up the rows of ``hash_ids`` ``[T, C]`` into :attr:`staged`, on the look-up stream if there is one.

        ``slot_tokens``: with tables sharded over data-parallel ranks, the largest T among them (a rank without tokens
        calls this too). ``host_ids``: the same ids in CPU memory, where the table can use them.
        Raises :class:`InvalidArgumentError` for more than ``max_tokens``.
        """
        ids = check_tensor("hash_ids", hash_ids, ("T", self.table.spec.columns), INDEX_DTYPES, self.table.ids_device)
        tokens = int(ids.shape[0])
        slot = self._exchange.slot(tokens, slot_tokens)
        if max(tokens, slot) > self.max_tokens:
            raise InvalidArgumentError(
                "hash_ids", f"{max(tokens, slot)} tokens", f"at most max_tokens = {self.max_tokens}"
            )
        self.table.check_capture()  # before another stream is drawn into the capture, which then could not end
        wanted = self._exchange.ids(ids, slot)
        if wanted is not ids:
            host_ids = None  # those of this rank's tokens alone
        rows = self._buffer[: wanted.shape[0]]
        stream = self.backend.lookup_stream()
        ready = None
        if self.reading is not None:
            # A chain that the current stream has not waited for: what comes below does not cover it.
            (stream or torch.accelerator.current_stream(self.backend.device)).wait_event(self.reading)
        if stream is None:
            self.table.lookup(wanted, out=rows, packed=self.wkv.accepts_packed, host_ids=host_ids)
        else:
            current = torch.accelerator.current_stream(self.backend.device)
            # torch.Event, whatever kind the stream is: a torch.Stream "waits" for a torch.cuda.Event without waiting.
            begun, ready = torch.Event(self.backend.device), torch.Event(self.backend.device)
            # Not only for the ids: gates and projections on the current stream may still read the buffer.
            begun.record(current)
            stream.wait_event(begun)
            with stream:
                self.table.lookup(wanted, out=rows, background=True, packed=self.wkv.accepts_packed, host_ids=host_ids)
            ready.record(stream)
            if wanted.device.type != "cpu":  # ids of a table that is gathered on the CPU
                # The caller may drop them now; their memory is not to be given away before they are read.
                wanted.record_stream(stream)
        self.staged = StagedRows(rows, tokens, slot, ready, self.table.version)

    def await_rows(self) -> None:
        """Make the current stream wait for the look-up in flight, if there is one."""
        if self.staged is not None and self.staged.ready is not None:
            torch.accelerator.current_stream(self.backend.device).wait_event(self.staged.ready)

    def take_rows(self, *, ahead: bool = False) -> torch.Tensor:
        """The staged rows, whole: ``[window, C, D | W]`` on the current stream; they can be taken once.

        ``ahead``: exchange between ranks on the side stream's communicator. Raises :class:`StepError` where nothing is
        staged, or the table was written after the look-up.
        """
        staged = self.staged
        if staged is None:
            raise StepError(f"layer {self.layer_id}: no rows are staged; call prepare(hash_ids) first")
        self.await_rows()
        self.staged = None
        if staged.table_version != self.table.version:
            raise StepError(f"layer {self.layer_id}: the table was written after prepare; prepare again")
        return self._exchange.join(staged.rows, staged.num_tokens, staged.slot, ahead)

    def project(self, rows: torch.Tensor, out: torch.Tensor | None = None, *, ahead: bool = False) -> torch.Tensor:
        """``kv`` of whole rows; ``out`` ``[window, kv_features]``."""
        if self.wkv.collective_in_forward and ahead:
            return self.wkv.forward(rows, out=out, ahead=True)
        return self.wkv.forward(rows, out=out)

    def inject(
        self, hidden_states: torch.Tensor, kv: torch.Tensor, num_tokens: int, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The gate of ``kv`` (this rank's window of a batch of ``num_tokens``) into ``hidden_states``."""
        mine = self._check_hidden(hidden_states, num_tokens, token_mask)
        slots = int(hidden_states.shape[0])
        mask, real = token_mask, None
        if self.parallel.sequence and mask is not None:
            mask = mask[mine.start : mine.start + mine.real]
        if slots != mine.real:
            real = mine.real
            kv = _padded(kv, slots)
            mask = None if mask is None else _padded(mask, slots)
        return self.backend.post_wkv(hidden_states, kv, self.gate, wkv=self.wkv, token_mask=mask, num_kv_tokens=real)

    def forward(
        self, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The whole layer, in line."""
        check_tensor("hash_ids", hash_ids, ("T", self.table.spec.columns), INDEX_DTYPES, self.table.ids_device)
        self._check_hidden(hidden_states, int(hash_ids.shape[0]), token_mask)
        if self.table.spec.exchange.data_size > 1:
            raise StepError("forward: tables shared by data-parallel ranks need a common slot; use EngramMemory.step")
        self.prepare(hash_ids)
        return self.forward_staged(hidden_states, token_mask)

    def forward_staged(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`forward` on the rows that :meth:`prepare` staged."""
        if self.staged is None:
            raise StepError(f"layer {self.layer_id}: no rows are staged; call prepare(hash_ids) first")
        tokens = self.staged.num_tokens
        self._check_hidden(hidden_states, tokens, token_mask)
        kv = self.project(self.take_rows())
        return self.inject(hidden_states, kv, tokens, token_mask)

    def dry_run(self, tokens: int) -> None:
        """One forward of ``tokens`` empty tokens, to compile what it runs; on every rank with the same count."""
        own = window(tokens, self.parallel).slot
        hidden = torch.zeros(
            own, self.gate.hc_mult, self.gate.dim, dtype=self.wkv.spec.dtype, device=self.backend.device
        )
        ids = torch.full((tokens, self.table.spec.columns), -1, dtype=torch.int32, device=self.table.ids_device)
        slot = tokens if self.table.spec.exchange.data_size > 1 else None
        if self.table.host_ids_from is not None and tokens >= self.table.host_ids_from:
            self.prepare(ids, slot, ids.cpu())
        self.prepare(ids, slot)
        self.forward_staged(hidden)

    def _check_hidden(self, hidden_states: torch.Tensor, tokens: int, token_mask: torch.Tensor | None) -> Window:
        mine = window(tokens, self.parallel)
        shape = ("T", self.gate.hc_mult, self.gate.dim)
        device = self.backend.device
        hidden = check_tensor("hidden_states", hidden_states, shape, (self.wkv.spec.dtype,), device, dense_last=True)
        if hidden.shape[0] not in (mine.real, mine.slot):
            raise InvalidArgumentError(
                "hidden_states", describe(hidden), f"{mine.real} tokens, as the batch (or {mine.slot} slots)"
            )
        if token_mask is not None:
            check_tensor("token_mask", token_mask, (tokens,), (torch.bool,), device)
        return mine


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
