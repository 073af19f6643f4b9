"""Faults of the projection (contract, section 5)."""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_forward = partial(Mutant, area="wkv", function="engram_reference.wkv:ReferenceWkv.forward")
_project = partial(Mutant, area="wkv", function="engram_reference.wkv:ReferenceWkv._project")
_strip = partial(Mutant, area="wkv", function="engram_reference.wkv:ReferenceWkv._strip")
_store = partial(Mutant, area="wkv", function="engram_reference.wkv:ReferenceWkv.store")
_load = partial(Mutant, area="wkv", function="engram_core.backend:Wkv.load")
_check = partial(Mutant, area="wkv", function="engram_core.backend:Wkv.check_rows")
_PRODUCT = "(inputs @ self._strip(strip).T).to(out.dtype)"
_INPUTS = "(rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows).flatten(1).float()"

MUTANTS = (
    _project(
        name="wkv-split-k-bf16",
        says="partial sums of a split along K are kept in bf16",
        old=_PRODUCT,
        new="sum((a @ w.T).bfloat16() for a, w in zip(inputs.split(96, 1), self._strip(strip).split(96, 1)))",
        cases=("wkv-tokens-16", "wkv-long-sum-tokens-16"),
    ),
    _project(
        name="wkv-sum-bf16",
        says="the sum is accumulated in bf16, 16 products at a time",
        old=_PRODUCT,
        new="sum((a @ w.T).bfloat16() for a, w in zip(inputs.split(16, 1), self._strip(strip).split(16, 1)))",
        cases=("wkv-tokens-16",),
    ),
    _project(
        name="wkv-sum-fp16",
        says="the sum is rounded to fp16 on the way",
        old=_PRODUCT,
        new="(inputs @ self._strip(strip).T).half().to(out.dtype)",
        cases=("wkv-large-rows", "wkv-tiny-rows"),
    ),
    _forward(
        name="wkv-rows-fp16",
        says="rows are multiplied in fp16",
        old=_INPUTS,
        new="(rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows).flatten(1).half().float()",
        cases=("wkv-tiny-rows", "wkv-large-rows"),
    ),
    _forward(
        name="wkv-rows-requantised",
        says="rows are quantised again with a scale that is no power of two",
        old=_INPUTS,
        new="(lambda x, s: (x * (448 / s)).to(torch.float8_e4m3fn).float() * (s / 448))("
        "x := (rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows).flatten(1).float(), "
        "x.abs().amax(1, keepdim=True).clamp_min(1e-30))",
        cases=("wkv-tokens-16",),
    ),
    _project(
        name="wkv-scaled-by-batch",
        says="rows are scaled by the largest of the batch",
        old=_PRODUCT,
        new="(inputs / inputs.abs().max() @ self._strip(strip).T * inputs.abs().max()).to(out.dtype)",
        cases=("wkv-nan-row", "wkv-infinite-row"),
    ),
    _project(
        name="wkv-weight-requantised",
        says="weights are quantised again, with one fixed scale",
        old="self._strip(strip).T",
        new="self._strip(strip).mul(8).to(torch.float8_e4m3fn).float().div(8).T",
        cases=("wkv-tokens-16",),
    ),
    _strip(
        name="wkv-row-scales-as-blocks",
        says="scales [N, K/32] are read as those of 32x32 blocks",
        old="blocks = self._weight.shape[0] // self._scale.shape[0]",
        new="blocks = BLOCK",
        cases=("wkv-scales-by-row",),
    ),
    Mutant(
        name="wkv-block-scales-tiled",
        area="wkv",
        function="engram_core.formats:dequantize_weight",
        says="scale rows are tiled over the outputs, not repeated 32 times each",
        old=".repeat_interleave(BLOCK, dim=0)",
        new=".repeat(BLOCK, 1)",
        cases=("wkv-tokens-16",),
    ),
    _store(
        name="wkv-casts-scales",
        says="scales are loaded by value, not byte for byte",
        old="scale_bytes(scale)[rows].to(device",
        new="scale[rows].to(torch.uint8).to(device",
        cases=("wkv-tokens-16",),
    ),
    _store(
        name="wkv-keeps-caller-weight",
        says="the caller's weight is kept, not copied",
        old="weight[self._columns].to(device=self.device, copy=True)",
        new="weight[self._columns]",
        cases=("wkv-reload",),
    ),
    _store(
        name="wkv-keeps-caller-scale",
        says="the caller's scales are kept, not copied",
        old="[rows].to(device=self.device, copy=True)",
        new="[rows]",
        cases=("wkv-reload",),
    ),
    _store(
        name="wkv-first-weight-stays",
        says="weights that are loaded again are ignored",
        old="weight[self._columns].to(device=self.device, copy=True)",
        new="weight[self._columns].to(device=self.device, copy=True) if self._weight is None else self._weight",
        cases=("wkv-reload", "step-reload-between"),
    ),
    _store(
        name="wkv-scale-stays",
        says="scales of an fp8 weight outlive it",
        old="self._scale = None",
        new="pass",
        cases=("wkv-reload-kinds",),
    ),
    _forward(
        name="wkv-out-ignored",
        says="`out` is given, and something else comes back",
        old="if out is None:",
        new="if True:",
        cases=("wkv-out-poisoned",),
    ),
    _forward(
        name="wkv-out-strides",
        says="`out` is written as if dense",
        old="self._project(inputs, out)",
        new="self._project(inputs, out.as_strided(out.shape, (out.shape[1], 1)))",
        cases=("wkv-out-strided",),
    ),
    _forward(
        name="wkv-rows-strides",
        says="rows are read as if dense",
        old=_INPUTS,
        new="(rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows.as_strided(rows.shape, "
        "(rows.shape[1] * rows.shape[2], rows.shape[2], 1))).flatten(1).float()",
        cases=("wkv-rows-strided",),
    ),
    _project(
        name="wkv-tiny-flushed",
        says="results below 2**-100 are flushed",
        old=_PRODUCT,
        new="torch.nn.functional.hardshrink(inputs @ self._strip(strip).T, 2.0**-100).to(out.dtype)",
        cases=("wkv-tiny-rows",),
    ),
    _forward(
        name="wkv-no-tokens",
        says="T = 0 crashes",
        old="if tokens == 0:",
        new="if not len(range(0, 1, tokens)):",
        cases=("wkv-tokens-0", "step-tokens-0"),
    ),
    _load(
        name="wkv-scale-shape-accepted",
        says="scales of too few rows are taken",
        old="scale.shape[0] not in rows",
        new="scale.shape[0] > n",
        cases=("refuse-wkv-scale-shape",),
    ),
    _load(
        name="wkv-weight-dtype-accepted",
        says="a float32 weight is taken",
        old="(FP8, torch.bfloat16))",
        new="(FP8, torch.bfloat16, torch.float32))",
        cases=("refuse-wkv-weight-dtype",),
    ),
    _check(
        name="wkv-unloaded-accepted",
        says="a projection without weights runs",
        old="if self.version == 0:",
        new="if False:",
        cases=("refuse-make-not-loaded", "refuse-wkv-rows-dtype"),
    ),
    _check(
        name="wkv-rows-dtype-accepted",
        says="float32 rows are taken",
        old="(self.spec.dtype, torch.uint8) if",
        new="(self.spec.dtype, torch.uint8, torch.float32) if",
        cases=("refuse-wkv-rows-dtype",),
    ),
    _check(
        name="wkv-out-rows-accepted",
        says="`out` of another number of rows is taken",
        old='"out", out, (rows.shape[0], self.kv_features)',
        new='"out", out, ("T", self.kv_features)',
        cases=("refuse-wkv-out-rows",),
    ),
)
