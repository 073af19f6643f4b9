"""Whole steps: against the oracle, and bit for bit against each layer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases import Case
from engram_conformance.data import model, random_hidden
from engram_conformance.driver import Work, hot_rows, plain, same
from engram_conformance.subject import Subject
from engram_core.errors import EngramError, StepError
from engram_core.hashing import TokenBatch
from engram_core.memory import EngramMemory


def _work(case: Case, tokens: int | None = None, seed: int = 0) -> Work:
    p = case.params
    tokens = p.get("tokens", 9) if tokens is None else tokens
    return Work.make(model(case.geometry), case.seed + seed, tokens, p.get("dead", ()), p.get("mask", ()))


def _memory(case: Case, subject: Subject, **options: Any) -> EngramMemory:
    return subject.memory(model(case.geometry), **options)


def test_whole(case: Case, subject: Subject) -> None:
    work = _work(case)
    options = {"layer_ids": case.params["stage"]} if "stage" in case.params else {}
    results = work.run(subject, _memory(case, subject, **options))
    work.judge(subject, results)


def test_packed(case: Case, subject: Subject) -> None:
    data, memory = model(case.geometry), _memory(case, subject)
    shape, rng = data.geometry, subject.rng()
    lengths, before, padding, width = (4, 1, 6), (0, 9, 2), 3, data.geometry.ngram - 1
    total = sum(lengths)
    tokens, history = rng.integers(0, shape.vocab, total + padding), rng.integers(0, shape.vocab, (3, width))
    positions = [b + j for n, b in zip(lengths, before, strict=True) for j in range(n)] + [0] * padding
    starts = np.cumsum([0, *lengths])
    ids = oracle.hash_ids(
        shape.numbers, data.map_ids, shape.pad, tokens.tolist(), positions, starts.tolist(), history.tolist()
    )
    hidden = random_hidden(rng, total + padding, shape.copies, shape.hidden)
    mask = np.arange(total + padding) < total
    inputs = [torch.tensor(x) for x in (tokens, np.array(positions), starts, history)]
    batch = TokenBatch(inputs[0], inputs[1], inputs[2], inputs[3]).to(subject.device)
    with memory.step(batch, token_mask=subject.to(mask)) as step:
        for layer_id in memory.layers:
            out = step.inject(layer_id, subject.bf16(hidden))
            bounds = data.expect(layer_id, hidden, ids)
            subject.judge(
                oracle.check_gate(bridge.bits(out), hidden, bounds, token_mask=mask, name=f"layer {layer_id}")
            )


def test_chunks(case: Case, subject: Subject) -> None:
    work, memory = _work(case, 13), _memory(case, subject)
    width, parts = work.model.geometry.ngram - 1, []
    for begin, end in ((0, 1), (1, 3), (3, 4), (4, 13)):
        back = [[int(work.tokens[begin - 1 - i]) if begin > i else -1 for i in range(width)]]
        chunk = torch.from_numpy(work.tokens[begin:end])
        batch = TokenBatch(chunk, torch.arange(begin, end), torch.tensor([0, end - begin]), torch.tensor(back))
        with memory.step(batch.to(subject.device)) as step:
            parts.append({i: step.inject(i, work.states(subject, i, slice(begin, end))) for i in memory.layers})
    work.judge(subject, {i: torch.cat([part[i] for part in parts]) for i in memory.layers})


def test_composition(case: Case, subject: Subject) -> None:
    work, memory = _work(case), _memory(case, subject)
    whole, ids = work.run(subject, memory), work.ids()
    for index, (layer_id, layer) in enumerate(memory.layers.items()):
        own = bridge.tensor(ids[:, index], layer.table.ids_device, torch.int32)
        kv = layer.wkv(layer.table.lookup(own))
        out = subject.backend.post_wkv(work.states(subject, layer_id), kv, layer.gate, wkv=layer.wkv)
        subject.same(whole[layer_id], out, f"layer {layer_id}")


def test_wait_apply(case: Case, subject: Subject) -> None:
    work, memory = _work(case), _memory(case, subject)
    want = work.run(subject, memory)
    with memory.step(work.batch(subject.device)) as step:
        for layer_id in memory.layers:
            step.wait(layer_id)
        got = {layer_id: step.apply(layer_id, work.states(subject, layer_id)) for layer_id in reversed(memory.layers)}
    same(subject, got, want)


def test_by_hand(case: Case, subject: Subject) -> None:
    work, memory = _work(case), _memory(case, subject)
    want = work.run(subject, memory)
    step = memory.step(work.batch(subject.device))
    step.start()
    same(subject, {i: step.inject(i, work.states(subject, i)) for i in memory.layers}, want)
    step.end()
    started = memory.step(work.batch(subject.device))
    started.start()
    with started:
        same(subject, {i: started.inject(i, work.states(subject, i)) for i in memory.layers}, want)


def test_other_layers(case: Case, subject: Subject) -> None:
    work, memory = _work(case), _memory(case, subject)
    with memory.step(work.batch(subject.device)) as step:
        for layer_id in (0, 2, 99):
            hidden = work.states(subject, case.params.get("layer", memory.config.layer_ids[0]))
            before = hidden.clone()
            subject.same(step.inject(layer_id, hidden), before, f"layer {layer_id}, without Engram")


def test_no_prefetch(case: Case, subject: Subject) -> None:
    work = _work(case)
    ahead, without = _memory(case, subject), _memory(case, subject, prefetch_rows=0)
    assert without.prefetch is None
    same(subject, work.run(subject, ahead), work.run(subject, without))


def test_skipped(case: Case, subject: Subject) -> None:
    first, second = _work(case), _work(case, seed=1)
    for rows in (0, 16):
        memory = _memory(case, subject, prefetch_rows=rows)
        first.run(subject, memory, case.params["order"])
        second.judge(subject, second.run(subject, memory), who=", after a step that skipped it")


def test_two_steps(case: Case, subject: Subject) -> None:
    first, second, memory = _work(case), _work(case, 11, seed=1), _memory(case, subject)
    wanted = plain(subject, memory, first), plain(subject, memory, second)
    results = first.run(subject, memory)
    same(subject, second.run(subject, memory), wanted[1], ", second step")
    same(subject, results, wanted[0], ", first step, read after the second")


def test_overtaken(case: Case, subject: Subject) -> None:
    first, second, memory = _work(case), _work(case, 9, seed=1), _memory(case, subject)
    layer_id = memory.config.layer_ids[-1]
    early, late = memory.step(first.batch(subject.device)), memory.step(second.batch(subject.device))
    early.start()
    late.start()
    try:
        got = early.inject(layer_id, first.states(subject, layer_id))
    except StepError:
        subject.record.add(0.0, None)
    else:
        first.judge(subject, {layer_id: got})
    second.judge(subject, {layer_id: late.inject(layer_id, second.states(subject, layer_id))})
    early.end()
    late.end()


def test_inputs_reused(case: Case, subject: Subject) -> None:
    work, memory, results = _work(case), _memory(case, subject), {}
    batch, mask = work.batch(subject.device), subject.to(work.open)
    with memory.step(batch, token_mask=mask) as step:
        for x in (batch.input_ids, batch.positions, batch.query_start):
            x.fill_(3)
        for layer_id in memory.layers:
            hidden = work.states(subject, layer_id)
            results[layer_id] = step.inject(layer_id, hidden)
            hidden.fill_(torch.nan)
            del hidden
            subject.poisoned(1 << 16)  # takes the memory that was freed, where the allocator gives it out again
    work.judge(subject, results)


def test_stale(case: Case, subject: Subject) -> None:
    memory = _memory(case, subject)
    for seed, tokens in enumerate((64, 3, 17, 1, 0, 16, 2)):
        work = _work(case, tokens, seed)
        work.judge(subject, work.run(subject, memory), who=f", {tokens} tokens")


def test_reload(case: Case, subject: Subject) -> None:
    with torch.inference_mode(case.params.get("inference", False)):
        _reload(case, subject)


def _reload(case: Case, subject: Subject) -> None:
    what, work, memory = case.params["what"], _work(case), _memory(case, subject)
    fresh = model(case.geometry, seed=2)
    keep = {"wkv": "wkv.", "table": "embed.", "gate": "_weight"}[what]
    work.judge(subject, work.run(subject, memory))
    # The oracle's model: the old one with the reloaded part replaced.
    part = {"wkv": ("codes", "scales"), "table": ("packed",), "gate": ("q", "k")}[what]
    layers = {
        i: type(old)(
            **{n: getattr(fresh.layers[i] if n in part else old, n) for n in ("packed", "codes", "scales", "q", "k")}
        )
        for i, old in work.model.layers.items()
    }
    changed = Work(type(work.model)(work.model.geometry, layers, work.model.map_ids), work.tokens, work.hidden)
    with memory.step(work.batch(subject.device)) as step:
        taken = memory.load_weights(
            (n, t) for n, t in fresh.weights() if keep in n and (what != "gate" or "wkv" not in n)
        )
        assert taken
        for layer_id in memory.layers:
            try:
                got = step.inject(layer_id, work.states(subject, layer_id))
            except EngramError:
                subject.record.add(0.0, None)
            else:
                changed.judge(subject, {layer_id: got}, who=f" after {what} was reloaded")
    changed.judge(subject, changed.run(subject, memory))


def test_reload_between(case: Case, subject: Subject) -> None:
    memory = _memory(case, subject)
    for seed in (1, 2, 1):
        fresh = model(case.geometry, seed=seed)
        memory.load_weights(fresh.weights())
        work = Work.make(fresh, case.seed, 9)
        # The token map is the memory's own: hashes are those of the first model.
        work = Work(type(fresh)(fresh.geometry, fresh.layers, model(case.geometry).map_ids), work.tokens, work.hidden)
        work.judge(subject, work.run(subject, memory))


def test_inference(case: Case, subject: Subject) -> None:
    mode = torch.inference_mode if case.params["mode"] == "inference" else torch.no_grad
    with mode():
        test_whole(case, subject)
        test_reload(case, subject)
    memory = _memory(case, subject)
    with mode():
        work = _work(case)
        work.judge(subject, work.run(subject, memory))


def test_stage(case: Case, subject: Subject) -> None:
    work = _work(case)
    whole = work.run(subject, _memory(case, subject))
    for layer_id in work.model.geometry.layers:
        stage = _memory(case, subject, layer_ids=[layer_id])
        same(subject, work.run(subject, stage), whole)


def test_warmup(case: Case, subject: Subject) -> None:
    work, memory = _work(case), _memory(case, subject)
    want = work.run(subject, memory)
    fresh = _memory(case, subject)
    fresh.warmup([0, 1, 9, 16, 33])
    same(subject, work.run(subject, fresh), want)
    work.judge(subject, want)


def test_placement(case: Case, subject: Subject, tmp_path: Path) -> None:
    p, paths = case.params, None
    data = model(case.geometry)
    if p["placement"] == "file":
        for layer_id, layer in data.layers.items():
            (tmp_path / f"{layer_id}.rows").write_bytes(layer.packed.tobytes())
        paths = str(tmp_path / "{layer_id}.rows")
    options = {"cache_bytes": p["cache_bytes"]} if "cache_bytes" in p else {}
    memory = subject.memory(data, placement=p["placement"], table_path=paths, **options)
    for seed in range(3):
        work = _work(case, seed=seed)
        if options:
            memory.cache_rows(hot_rows(memory, seed))
        work.judge(subject, work.run(subject, memory))
        if options:
            hits = {layer_id: layer.table.cache_hits() for layer_id, layer in memory.layers.items()}
            assert all(0 < served < asked for served, asked in hits.values()), f"hits of the cache: {hits}"


def test_host_ids(case: Case, subject: Subject, tmp_path: Path) -> None:
    data, work = model(case.geometry), _work(case)
    for layer_id, layer in data.layers.items():
        (tmp_path / f"{layer_id}.rows").write_bytes(layer.packed.tobytes())
    placement = case.params["placement"]
    paths = str(tmp_path / "{layer_id}.rows") if placement == "file" else None
    memory = subject.memory(data, placement=placement, table_path=paths)
    batch = work.batch(subject.device)
    ids = memory.hash_on_host(batch)
    assert ids.device.type == "cpu"
    with memory.step(batch, host_ids=ids) as step:
        results = {layer_id: step.inject(layer_id, work.states(subject, layer_id)) for layer_id in memory.layers}
    work.judge(subject, results)
    with subject.raises("host_ids"):
        memory.step(batch, host_ids=ids[1:])


def test_host_batch(case: Case, subject: Subject, tmp_path: Path) -> None:
    data, work = model(case.geometry), _work(case)
    paths = {layer_id: tmp_path / f"{layer_id}.rows" for layer_id in data.layers}
    for layer_id, path in paths.items():
        path.write_bytes(data.layers[layer_id].packed.tobytes())
    memory = subject.memory(data, placement="file", table_path=paths)
    batch = work.batch(subject.device)
    if subject.device.type != "cpu":
        assert batch.host is not None
        lacking = TokenBatch(batch.input_ids, batch.positions, batch.query_start, batch.lookback)
        if any(layer.table.ids_device != subject.device for layer in memory.layers.values()):
            with subject.raises("host"):
                memory.step(lacking).start()
    work.judge(subject, work.run(subject, memory))
