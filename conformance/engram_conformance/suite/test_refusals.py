"""Bad input: the error names the argument, and nothing is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge
from engram_conformance.cases import Case
from engram_conformance.cases.geometry import geometry
from engram_conformance.data import model, random_gate, random_hidden, random_rows, random_weight
from engram_conformance.driver import Work
from engram_conformance.subject import Subject
from engram_core.config import EngramConfig
from engram_core.hashing import TokenBatch
from engram_core.layout import HashLayout
from engram_core.memory import EngramMemory
from engram_core.parallel import Parallel
from engram_core.specs import TableSpec, WkvSpec
from engram_core.tokens import TokenMap

_T, _H, _DIM = 5, 4, 128
_ELSEWHERE = torch.device("meta")


def test_gate(case: Case, subject: Subject) -> None:
    rng = subject.rng()
    hidden = subject.bf16(random_hidden(rng, _T, _H, _DIM))
    kv = subject.bf16(random_hidden(rng, _T, _H + 1, _DIM)).flatten(1)
    weights = subject.gate_weights(*random_gate(rng, _H, _DIM))
    mask = torch.ones(_T, dtype=torch.bool, device=subject.device)
    poisoned = subject.poisoned(_T, _H, _DIM)
    area = case.params["what"].split("-")
    changes: dict[str, dict[str, Any]] = {
        "hidden-dtype": {"hidden_states": hidden.float()},
        "hidden-float16": {"hidden_states": hidden.half()},
        "hidden-dim": {"hidden_states": hidden[..., :96]},
        "hidden-copies": {"hidden_states": hidden[:, :2]},
        "hidden-flat": {"hidden_states": hidden.flatten(1)},
        "hidden-device": {"hidden_states": hidden.to(_ELSEWHERE)},
        "kv-width": {"kv": kv[:, : _H * _DIM]},
        "kv-rows": {"kv": kv[:-1]},
        "kv-dtype": {"kv": kv.float()},
        "mask-column": {"token_mask": mask[:, None]},
        "mask-short": {"token_mask": mask[:-1]},
        "mask-long": {"token_mask": torch.ones(_T + 1, dtype=torch.bool, device=subject.device)},
        "mask-float": {"token_mask": mask.float()},
        "mask-bytes": {"token_mask": mask.to(torch.uint8)},
        "mask-device": {"token_mask": mask.to(_ELSEWHERE)},
        "num-kv-negative": {"num_kv_tokens": -1},
        "num-kv-large": {"num_kv_tokens": _T + 1},
        "num-kv-float": {"num_kv_tokens": 2.0},
        "num-kv-tensor": {"num_kv_tokens": torch.tensor(2, device=subject.device)},
        "out-shape": {"out": subject.poisoned(_T + 1, _H, _DIM)},
        "out-dtype": {"out": subject.poisoned(_T, _H, _DIM, dtype=torch.float32)},
        "out-in-place": {"out": hidden},
        "out-overlaps-kv": {"out": kv[:, : _H * _DIM].view(_T, _H, _DIM)},
        "gate-width": {"gate": subject.gate_weights(*random_gate(rng, _H, 96))},
    }  # fmt: skip
    given: dict[str, Any] = {"hidden_states": hidden, "kv": kv, "gate": weights, "out": poisoned}
    given |= changes[case.params["what"]]
    names = {"hidden": ("hidden_states", "kv"), "kv": ("kv",), "mask": ("token_mask",), "num": ("num_kv_tokens",),
             "out": ("out",), "gate": ("gate", "q_weight", "hidden_states")}[area[0]]  # fmt: skip
    with subject.raises(*names, out=given["out"]):
        subject.backend.post_wkv(given.pop("hidden_states"), given.pop("kv"), given.pop("gate"), **given)


def test_wkv(case: Case, subject: Subject) -> None:
    shape, what = geometry(case.geometry), case.params["what"]
    rng = subject.rng()
    wkv = subject.wkv(shape)
    codes, scales = random_weight(rng, shape.n, shape.k)
    weight, scale = bridge.fp8(codes, subject.device), bridge.e8m0(scales, subject.device)
    loads: dict[str, tuple[Any, Any]] = {
        "weight-shape": (weight[:-32], scale[:-1]),
        "weight-dtype": (weight.float(), None),
        "scale-missing": (weight, None),
        "scale-shape": (weight, scale[:-1]),
        "scale-dtype": (weight, scale.float()),
    }
    if what in loads:
        with subject.raises("weight" if what.startswith("weight") else "scale"):
            wkv.load(*loads[what])
        return
    rows = subject.bf16(random_hidden(rng, _T, shape.columns, shape.head_dim))
    with subject.raises("weight"):
        wkv(rows)
    wkv.load(weight, scale)
    given, out = {
        "rows-dtype": (rows.float(), None),
        "rows-columns": (rows[:, :-1], None),
        "rows-flat": (rows.flatten(1), None),
        "rows-device": (rows.to(_ELSEWHERE), None),
        "out-shape": (rows, subject.poisoned(_T, shape.n + 32)),
        "out-rows": (rows, subject.poisoned(_T - 1, shape.n)),
        "out-dtype": (rows, subject.poisoned(_T, shape.n, dtype=torch.float32)),
    }[what]
    with subject.raises(what.split("-")[0], out=out):
        wkv(given, out=out)


def test_table(case: Case, subject: Subject) -> None:
    what, rng = case.params["what"], subject.rng()
    table = subject.table(TableSpec(60, 64, (20, 20, 20), subject.placement, Parallel.single()))
    packed = random_rows(rng, 60, 64)
    values, scales = bridge.fp8(packed[:, :64]), bridge.e8m0(packed[:, 64:])
    if what.startswith("load"):
        before = table.packed.clone()
        start, codes, names = {
            "load-past-end": (1, values, ("start", "values")),
            "load-width": (0, values[:, :32], ("values",)),
            "load-float": (0, values.float(), ("values",)),
        }[what]
        with subject.raises(*names):
            table.load(codes, scales, start)
        assert torch.equal(table.packed, before), "rows were written before the refusal"
        return
    ids = torch.zeros(_T, 3, dtype=torch.int32, device=table.ids_device)
    given, out = {
        "ids-float": (ids.float(), None),
        "ids-flat": (ids.flatten(), None),
        "ids-columns": (torch.zeros(_T, 4, dtype=torch.int32, device=table.ids_device), None),
        "ids-device": (ids.to(_ELSEWHERE), None),
        "out-shape": (ids, subject.poisoned(_T, 3, 96)),
        "out-dtype": (ids, subject.poisoned(_T, 3, 64, dtype=torch.float32)),
    }[what]
    with subject.raises("hash_ids" if what.startswith("ids") else "out", out=out):
        table.lookup(given, out=out)


def test_step(case: Case, subject: Subject) -> None:
    what, data = case.params["what"], model(case.geometry)
    memory = subject.memory(data, max_tokens=8)
    work = Work.make(data, case.seed, _T)
    batch, layer_id = work.batch(subject.device), data.geometry.layers[0]
    hidden = work.states(subject, layer_id)
    step = memory.step(batch)
    if what == "batch-type":
        with subject.raises("batch"):
            memory.step([1, 2, 3])  # type: ignore[arg-type]
    elif what == "batch-too-large":
        with subject.raises("batch", "tokens"):
            memory.step(Work.make(data, 0, 9).batch(subject.device))
    elif what == "batch-lookback":
        with subject.raises("lookback"):
            memory.step(replace(batch, lookback=batch.input_ids.new_full((1, 2), -1), host=None)).start()
    elif what.startswith("mask"):
        mask = torch.ones(_T, dtype=torch.bool, device=subject.device)
        with subject.raises("token_mask"):
            memory.step(batch, token_mask=mask[:-1] if what == "mask-short" else mask.float())
    elif what == "before-start":
        with subject.raises("start"):
            step.inject(layer_id, hidden)
    elif what == "after-end":
        with step:
            pass
        with subject.raises("end"):
            step.inject(layer_id, hidden)
    elif what == "started-twice":
        step.start()
        with subject.raises("start"):
            step.start()
    else:
        with step, subject.raises("hidden_states"):
            step.inject(layer_id, hidden[:-1] if what == "hidden-tokens" else hidden.float())


def test_make(case: Case, subject: Subject) -> None:
    what, data = case.params["what"], model(case.geometry)
    config, token_map = data.geometry.config(), data.token_map()

    def make(**options: Any) -> EngramMemory:
        options = {"placement": subject.placement, "max_tokens": 8, **options}
        return EngramMemory(
            options.pop("config", config), options.pop("token_map", token_map), subject.backend, **options
        )

    if what == "token-map-size":
        with subject.raises("token_map"):
            make(token_map=TokenMap(np.arange(499), 2))
    elif what == "unknown-layer":
        with subject.raises("layer_ids"):
            make(layer_ids=[2])
    elif what == "unknown-placement":
        with subject.raises("placement"):
            make(placement="disk")
    elif what == "max-tokens":
        with subject.raises("max_tokens"):
            make(max_tokens=0)
    elif what == "file-without-path":
        with subject.raises("path", "placement"):
            make(placement="file")
    elif what == "table-too-small":
        rows = data.geometry.numbers.rows
        with subject.raises("num_embeddings"):
            HashLayout.from_config(config.model_copy(update={"num_embeddings": (rows[0], rows[1] - 1)}))
    elif what == "copies-3":
        with subject.raises("hc_mult"):
            WkvSpec(384, 128, 3, Parallel.single())
    elif what == "config-key":
        mapping = {
            "hidden_size": 128, "hc_mult": 4, "engram_layer_ids": [1, 14], "engram_num_embeddings": [9, 9],
            "engram_vocab_size": 97, "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 64,
            "engram_compressed_vocab_size": 500, "engram_pad_token_id": 2, "rms_norm_eps": 1e-20,
        }  # fmt: skip
        for key in mapping:
            with subject.raises(key):
                EngramConfig.from_hf({k: v for k, v in mapping.items() if k != key})
    else:
        memory = make()
        batch = TokenBatch.single(torch.zeros(_T, dtype=torch.int64)).to(subject.device)
        layer_id = config.layer_ids[0]
        with subject.raises("weight"), memory.step(batch) as step:
            step.inject(layer_id, subject.poisoned(_T, _H, _DIM))


def test_file(case: Case, subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    if case.params["what"] == "size":
        path.write_bytes(bytes(60 * 66 - 1))
    spec = TableSpec(60, 64, (20, 20, 20), "file", Parallel.single(), path)
    with subject.raises(str(path)):
        subject.backend.create_table(spec)


def test_capture(case: Case, subject: Subject, tmp_path: Path) -> None:
    if subject.device.type != "cuda":
        subject.not_run(f"device graphs are a matter of CUDA and HIP; the device is {subject.device}")
    path = tmp_path / "rows"
    path.write_bytes(bytes(60 * 66))
    table = subject.table(TableSpec(60, 64, (20, 20, 20), "file", Parallel.single(), path))
    assert not table.graph_safe or table.ids_device == subject.device
    if table.graph_safe:
        subject.not_run("this backend's look-ups from a file are graph-safe")
    ids = torch.zeros(_T, 3, dtype=torch.int32, device=table.ids_device)
    out = subject.poisoned(_T, 3, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), subject.raises("placement", "capture"):
        table.lookup(ids, out=out)
