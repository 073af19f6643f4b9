"""Bad input that is taken (contract, section 9), and limits that are misreported."""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_operands = partial(Mutant, area="refusals", function="engram_core.checks:check_gate_operands")
_MASK = '"token_mask", token_mask, (tokens,), (torch.bool,), device'

MUTANTS = (
    _operands(
        name="accept-mask-column",
        says="token_mask [T, 1] is taken",
        old=_MASK,
        new='"token_mask", token_mask.flatten(), (tokens,), (torch.bool,), device',
        cases=("refuse-gate-mask-column",),
    ),
    _operands(
        name="accept-mask-float",
        says="a float mask is taken",
        old=_MASK,
        new='"token_mask", token_mask, (tokens,), (torch.bool, torch.float32), device',
        cases=("refuse-gate-mask-float",),
    ),
    _operands(
        name="accept-mask-bytes",
        says="a uint8 mask is taken",
        old=_MASK,
        new='"token_mask", token_mask, (tokens,), (torch.bool, torch.uint8), device',
        cases=("refuse-gate-mask-bytes",),
    ),
    _operands(
        name="accept-mask-long",
        says="a mask of more tokens is taken",
        old=_MASK,
        new='"token_mask", token_mask[:tokens], (tokens,), (torch.bool,), device',
        cases=("refuse-gate-mask-long",),
    ),
    _operands(
        name="accept-mask-elsewhere",
        says="a mask on another device is taken",
        old=_MASK,
        new='"token_mask", token_mask, (tokens,), (torch.bool,)',
        cases=("refuse-gate-mask-device",),
    ),
    _operands(
        name="accept-hidden-float",
        says="hidden states of other dtypes are taken",
        old="dtypes = (torch.bfloat16,)",
        new="dtypes = (torch.bfloat16, torch.float16, torch.float32)",
        cases=("refuse-gate-hidden-dtype", "refuse-gate-hidden-float16", "refuse-gate-out-dtype"),
    ),
    _operands(
        name="accept-kv-rows",
        says="kv of fewer rows is taken",
        old='"kv", kv, (tokens, kv_features)',
        new='"kv", kv, ("T", kv_features)',
        cases=("refuse-gate-kv-rows",),
    ),
    _operands(
        name="accept-num-kv-large",
        says="a num_kv_tokens above T is taken",
        old="not 0 <= num_kv_tokens <= tokens",
        new="num_kv_tokens < 0",
        cases=("refuse-gate-num-kv-large",),
    ),
    _operands(
        name="accept-num-kv-tensor",
        says="a num_kv_tokens on the device is read back",
        old="not isinstance(num_kv_tokens, int)",
        new="not isinstance(num_kv_tokens, (int, torch.Tensor))",
        cases=("refuse-gate-num-kv-tensor",),
    ),
    _operands(
        name="accept-in-place",
        says="`out` may be an input",
        old='check_disjoint("out", out, hidden_states=hidden_states, kv=kv, token_mask=token_mask)',
        new="pass",
        cases=("refuse-gate-out-in-place", "refuse-gate-out-overlaps-kv"),
    ),
    Mutant(
        name="accept-late-refusal",
        area="refusals",
        function="engram_reference.gate:apply_gate",
        says="`out` is written before the operands are checked",
        old='check_tensor("gate", weights.q_weight, weights.q_weight.shape, (weights.q_weight.dtype,), device)',
        new="out = out if out is None else out.fill_(1.0)",
        cases=("refuse-gate-kv-width", "refuse-gate-mask-short"),
    ),
    Mutant(
        name="accept-table-ids-float",
        area="refusals",
        function="engram_core.table:EngramTable.lookup",
        says="float ids are taken",
        old="INDEX_DTYPES, self.ids_device)",
        new="(*INDEX_DTYPES, torch.float32), self.ids_device)",
        cases=("refuse-table-ids-float",),
    ),
    Mutant(
        name="accept-load-past-end",
        area="refusals",
        function="engram_core.table:EngramTable.load",
        says="rows past the table's end are dropped in silence",
        old="if not 0 <= start <= self.spec.rows - count:",
        new="if start < 0:",
        cases=("refuse-table-load-past-end",),
    ),
    Mutant(
        name="accept-token-map",
        area="refusals",
        function="engram_core.hashing:check_token_map",
        says="another model's token map is taken",
        old="token_map.size != config.compressed_vocab_size",
        new="False",
        cases=("refuse-make-token-map-size",),
    ),
    Mutant(
        name="accept-undeclared",
        area="refusals",
        function="engram_core.limits:declared",
        says="supports() gives no reason against what is not declared",
        old="if needed and capability not in info.capabilities",
        new="if False",
        cases=("rows-hot-rows", "step-hot-rows"),
    ),
    Mutant(
        name="refuse-declared",
        area="refusals",
        function="engram_core.limits:declared",
        says="supports() gives a reason against what is declared and works",
        old="if needed and capability not in info.capabilities",
        new="if needed",
        cases=("step-whole-small",),
    ),
)
