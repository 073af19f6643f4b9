"""Ranks: all of them in one process, taking turns; and a few runs as real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle, processes
from engram_conformance.cases import Case
from engram_conformance.data import LayerData, Model, model
from engram_conformance.driver import Work
from engram_conformance.ranks import Play
from engram_conformance.subject import Subject
from engram_core.errors import EngramError
from engram_core.memory import EngramMemory
from engram_core.parallel import Parallel


def _works(case: Case, tokens: int | None = None, seed: int = 0) -> Work:
    p = case.params
    tokens = p["tokens"] if tokens is None else tokens
    return Work.make(model(case.geometry), case.seed + seed, tokens, p.get("dead", ()), p.get("mask", ()))


def _whole_rows(layer: Any) -> Any:
    rows = layer.take_rows()
    return oracle.decode_rows(bridge.array(rows)) if rows.dtype == torch.uint8 else bridge.bits(rows)


def _special(data: Model) -> Model:
    """Rows that hold -0.0 and NaN: a sum of values would lose the one and a sum of floats the other's place."""
    layers = {}
    for layer_id, layer in data.layers.items():
        packed = layer.packed.copy()
        packed[::3, :16], packed[1::3, 16:32] = 0x80, 0x7F
        layers[layer_id] = LayerData(packed, layer.codes, layer.scales, layer.q, layer.k)
    return Model(data.geometry, layers, data.map_ids)


def test_rows(case: Case, subject: Subject) -> None:
    data, ranks = model(case.geometry), case.params["ranks"]
    data = _special(data) if case.params.get("special") else data
    play: Play[dict[int, Any]] = Play(ranks, subject.device)
    seats = play.everyone()
    ids = Work.make(data, case.seed, 7).ids()
    ids[0, :, 0], ids[1, :, 1] = -1, 2**30  # nowhere: zero rows on every rank

    def act(rank: int) -> dict[int, Any]:
        memory = subject.memory(data, Parallel(seats[rank]))
        found = {}
        for index, (layer_id, layer) in enumerate(memory.layers.items()):
            layer.prepare(bridge.tensor(ids[:, index], layer.table.ids_device, torch.int32))
            found[layer_id] = _whole_rows(layer)
        return found

    for rank, found in enumerate(play.run(act)):
        for layer_id, rows in found.items():
            subject.judge(oracle.check_bits(rows, data.rows(layer_id, ids), f"layer {layer_id}, rank {rank}, rows"))


def _steps(
    case: Case, subject: Subject, posts: list[bool] | None = None, **options: Any
) -> tuple[Play[Any], list[Work], list[list[Any]]]:
    """The case's batches, one after another, on all tensor ranks: the play, the batches, each rank's results.

    ``posts``: takes each layer's ``collective_in_post``.
    """
    p = case.params
    play: Play[Any] = Play(p["ranks"], subject.device)
    seats, aheads = play.everyone(), play.everyone("ahead") if options.pop("ahead", False) else None
    works = [_works(case, tokens, seed) for seed, tokens in enumerate(p["tokens"])]
    stage: dict[str, Any] = {"layer_ids": (14,)} if case.geometry == "real" else {}

    def act(rank: int) -> list[Any]:
        parallel = Parallel(seats[rank], ahead=aheads[rank] if aheads else None)
        memory = subject.memory(model(case.geometry), parallel, **options, **stage)
        if posts is not None:
            posts.extend(layer.wkv.collective_in_post for layer in memory.layers.values())
        deferred = p.get("deferred", False)
        return [work.run(subject, memory, p.get("order"), deferred=deferred) for work in works]

    return play, works, play.run(act)


def test_tensor(case: Case, subject: Subject) -> None:
    _, works, results = _steps(case, subject)
    for index, work in enumerate(works):
        work.judge(subject, results[0][index], who=", rank 0")
        for rank, own in enumerate(results[1:], 1):
            work.judge(subject, own[index], who=f", rank {rank}") if len(works) == 1 and rank == 1 else None
            for layer_id, got in own[index].items():
                subject.same(got, results[0][index][layer_id], f"layer {layer_id}, rank {rank} and rank 0")


def test_exchanges(case: Case, subject: Subject) -> None:
    play, works, results = _steps(case, subject)
    for rank, log in enumerate(play.log):
        assert log == play.log[0], f"rank {rank} exchanges {log}; rank 0 {play.log[0]}"
    for index, work in enumerate(works):
        work.judge(subject, results[0][index])


def test_equal(case: Case, subject: Subject) -> None:
    for _ in range(2):
        _, _, results = _steps(case, subject)
        for rank, own in enumerate(results):
            for layer_id, got in own[0].items():
                subject.same(got, results[0][0][layer_id], f"layer {layer_id}, rank {rank} and rank 0")


def test_ahead(case: Case, subject: Subject) -> None:
    posts: list[bool] = []
    play, works, results = _steps(case, subject, posts, ahead=True, prefetch_rows=16)
    for own in results:
        for index, work in enumerate(works):
            work.judge(subject, own[index])
    # A gate that exchanges does so where the decoder is, on the decoder's communicator; a chain never does.
    gates = len(works) * sum(posts[: len(posts) // play.size])
    for rank, log in enumerate(play.log):
        main = [entry for entry in log if entry[0] != "ahead"]
        assert len(main) <= gates, (
            f"rank {rank}: steps that run ahead exchanged {main}; only {gates} gates may, on the decoder's communicator"
        )
    assert all(log == play.log[0] for log in play.log), "ranks exchanged in different orders"


def test_no_ahead(case: Case, subject: Subject) -> None:
    play: Play[Any] = Play(case.params["ranks"], subject.device)
    seats, work = play.everyone(), _works(case, 9)

    def act(rank: int) -> tuple[list[Any], dict[int, torch.Tensor]]:
        memory = subject.memory(model(case.geometry), Parallel(seats[rank]))
        reasons = [subject.backend.prefetchable(layer) for layer in memory.layers.values()]
        return reasons, work.run(subject, memory)

    for reasons, results in play.run(act):
        work.judge(subject, results)
        assert all(reasons), "a chain that exchanges would run ahead on the decoder's communicator"
        assert all(reason.message for support in reasons for reason in support)


def test_file(case: Case, subject: Subject, tmp_path: Path) -> None:
    data = model(case.geometry)
    for layer_id, layer in data.layers.items():
        (tmp_path / f"{layer_id}.rows").write_bytes(layer.packed.tobytes())
    _, works, results = _steps(case, subject, placement="file", table_path=str(tmp_path / "{layer_id}.rows"))
    for own in results:
        works[0].judge(subject, own[0])


def test_data(case: Case, subject: Subject) -> None:
    counts, tensor = case.params["counts"], case.params.get("tensor", 1)
    play: Play[Any] = Play(len(counts) * tensor, subject.device)
    # Rank r of the play: data-parallel rank r // tensor, tensor rank r % tensor.
    data_groups = [play.group(f"data {t}", range(t, play.size, tensor)) for t in range(tensor)]
    tensor_groups = [play.group(f"tensor {d}", range(d * tensor, (d + 1) * tensor)) for d in range(len(counts))]
    works = [_works(case, tokens, seed) for seed, tokens in enumerate(counts)]
    later = [_works(case, tokens, seed + 50) for seed, tokens in enumerate(reversed(counts))]

    def act(rank: int) -> list[dict[int, torch.Tensor]]:
        d, t = divmod(rank, tensor)
        memory = subject.memory(model(case.geometry), Parallel(tensor_groups[d][t], data=data_groups[t][d]))
        return [w[d].run(subject, memory, slot_tokens=max(counts)) for w in (works, later)]

    for rank, results in enumerate(play.run(act)):
        for expected, got in zip((works, later), results, strict=True):
            expected[rank // tensor].judge(subject, got, who=f", rank {rank}")


def test_slot(case: Case, subject: Subject) -> None:
    play: Play[str] = Play(2, subject.device)
    seats, work = play.everyone("data"), _works(case, 3)
    alone = Play[None](1, subject.device).everyone()[0]

    def act(rank: int) -> str:
        memory = subject.memory(model(case.geometry), Parallel(alone, data=seats[rank]))
        try:
            work.run(subject, memory)
        except EngramError as error:
            return str(error)
        return ""

    for message in play.run(act):
        assert "slot_tokens" in message, f"a step without slot_tokens: {message or 'nothing was raised'}"
        subject.record.add(0.0, None)
    assert not any(play.log), "an exchange was begun before the refusal"


def test_sequence(case: Case, subject: Subject) -> None:
    p, work = case.params, _works(case)
    ranks, tokens = p["ranks"], p["tokens"]
    slot = -(-tokens // ranks)
    play: Play[Any] = Play(ranks, subject.device)
    seats = play.everyone()
    windows = [slice(min(r * slot, tokens), min((r + 1) * slot, tokens)) for r in range(ranks)]

    def act(rank: int) -> dict[int, torch.Tensor]:
        memory = subject.memory(model(case.geometry), Parallel(seats[rank], sequence=True))
        if not p.get("padded"):
            return work.run(subject, memory, window=windows[rank])
        return _padded(subject, memory, work, windows[rank], slot)

    for rank, results in enumerate(play.run(act)):
        work.judge(subject, results, windows[rank], f", rank {rank}")


def _padded(subject: Subject, memory: EngramMemory, work: Work, window: slice, slot: int) -> dict[int, torch.Tensor]:
    real, results = window.stop - window.start, {}
    with memory.step(work.batch(subject.device)) as step:
        for layer_id in memory.layers:
            # -0.0 would become +0.0 in h + gate * 0.
            hidden = torch.full_like(subject.poisoned(slot, *work.hidden[layer_id].shape[1:]), -0.0)
            hidden[:real] = work.states(subject, layer_id, window)
            out = step.inject(layer_id, hidden)
            subject.same(out[real:], hidden[real:], f"layer {layer_id}, padding")
            results[layer_id] = out[:real]
    return results


def test_processes(case: Case, subject: Subject, tmp_path: Path) -> None:
    ranks, kind = case.params["ranks"], case.params["kind"]
    if reason := processes.cannot_run(subject.device, ranks):
        subject.not_run(reason)
    counts = [3, 0, 5, 2][:ranks] if kind == "data" else [9] * ranks
    results = processes.run(subject, case.geometry, kind, case.seed, counts, tmp_path)
    slot = -(-9 // ranks)
    for rank, own in enumerate(results):
        work = Work.make(model(case.geometry), case.seed + (rank if kind == "data" else 0), counts[rank])
        window = slice(rank * slot, min((rank + 1) * slot, 9)) if kind == "sequence" else slice(None)
        got = {int(layer_id): bridge.bf16(bits.view(np.uint16)) for layer_id, bits in own.items()}
        work.judge(subject, got, window, f", process {rank}")
