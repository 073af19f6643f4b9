"""``post_wkv``: the shared gate on a whole projection, or the gate over slices of dim with one all-gather.

Which of the two runs is a trait of the projection, the same on every rank; whether anything is exchanged depends on T
alone, which all tensor-parallel ranks share.
"""

from __future__ import annotations

import torch

from engram_core.backend import GateWeights
from engram_core.checks import check_gate_operands, check_tensor
from engram_core.errors import CollectiveError
from engram_core.kernels.device import on
from engram_core.kernels.gate import gate as whole_gate
from engram_rocm.gate_finish import finish_gate
from engram_rocm.gate_pack import pack_slice
from engram_rocm.wkv import RocmWkv


def apply_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weights: GateWeights,
    wkv: RocmWkv | None,
    token_mask: torch.Tensor | None,
    num_kv_tokens: int | None,
    out: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """See :meth:`engram_core.backend.EngramBackend.post_wkv`."""
    copies, dim = weights.hc_mult, weights.dim
    check_tensor("gate", weights.q_weight, (copies, dim), (weights.q_weight.dtype,), device)
    sliced = wkv is not None and wkv.split.sliced
    features = wkv.kv_features if wkv is not None and sliced else (copies + 1) * dim
    out, live = check_gate_operands(hidden_states, kv, copies, dim, features, token_mask, num_kv_tokens, out, device)
    if out.shape[0] == 0:
        return out
    with on(device):
        if wkv is None or not sliced:
            return whole_gate(hidden_states, kv, weights, token_mask, live, out)
        mine = pack_slice(hidden_states, kv, weights, wkv.split)
        gathered = wkv.parallel.tensor.all_gather(mine, 0)
        if gathered.shape != (wkv.split.ranks * mine.shape[0], mine.shape[1]):
            need = f"{wkv.split.ranks} x {list(mine.shape)}, joined along the first dimension"
            raise CollectiveError(f"all_gather: gave {list(gathered.shape)}; needed are {need}")
        rows = gathered.contiguous()  # an engine's own collectives may join in another order of memory
        return finish_gate(hidden_states, rows, weights, wkv.split, token_mask, live, out)
