"""EngramMemory and its steps: weights by name, order of calls, reloads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import filled, tiny_config, weights

from engram_core import EngramConfig, EngramMemory, Parallel, TableSpec, TokenBatch, TokenMap
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError, StepError, TableError, UnsupportedConfigError

Hidden = Callable[[int], torch.Tensor]


def batch(tokens: int, seed: int = 0, dead: bool = False) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    gone = torch.rand(tokens, generator=generator) < 0.3 if dead else None
    return TokenBatch.single(torch.randint(0, 64, (tokens,), generator=generator), gone)


def alone(memory: EngramMemory, given: TokenBatch, hidden: torch.Tensor) -> torch.Tensor:
    """Both layers in line, without a step."""
    mask = None if given.dead is None else ~given.dead
    for layer, ids in zip(memory.layers.values(), memory.hasher(given).unbind(1), strict=True):
        hidden = layer(hidden, ids, mask)
    return hidden


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 40])
def test_a_step_gives_what_the_layers_give(memory: EngramMemory, hidden: Hidden, tokens: int) -> None:
    """Up to 16 tokens the WKV runs ahead, above it does not."""
    given, h = batch(tokens, dead=True), hidden(tokens)
    with memory.step(given) as step:
        found = step.inject(14, step.inject(5, step.inject(1, step.inject(0, h))))
    assert torch.equal(found, alone(memory, given, h))
    if tokens:
        assert not torch.equal(found, h)


def test_layers_may_be_taken_in_any_order_or_left_out(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    ids = memory.hasher(given)
    with memory.step(given) as step:
        assert torch.equal(step.inject(14, h), memory.layers[14](h, ids[:, 1]))
    with memory.step(batch(4, seed=3)) as step:
        assert torch.equal(step.inject(1, h), memory.layers[1](h, memory.hasher(batch(4, seed=3))[:, 0]))


def test_a_layer_may_be_injected_twice(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    with memory.step(given) as step:
        assert torch.equal(step.inject(1, h), step.inject(1, h))


def test_start_may_come_before_the_context(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    step = memory.step(given)
    step.start()
    with step:
        found = step.inject(14, step.inject(1, h))
    assert torch.equal(found, alone(memory, given, h))


def test_an_engine_may_start_and_end_a_step_itself(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    step = memory.step(given)
    step.start()
    found = step.inject(14, step.inject(1, h))
    step.end()
    assert torch.equal(found, alone(memory, given, h))
    with pytest.raises(StepError, match="it has ended"):
        step.inject(1, h)


def test_a_stage_without_engram_passes_everything_through(memory: EngramMemory, hidden: Hidden) -> None:
    stage = EngramMemory(memory.config, memory.token_map, memory.backend, layer_ids=[], max_tokens=8)
    h = hidden(4)
    with stage.step(batch(4)) as step:
        assert step.inject(1, h) is h


def test_token_mask_overrides_dead(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(5, dead=True), hidden(5)
    assert given.dead is not None
    with memory.step(given, token_mask=torch.ones(5, dtype=torch.bool)) as step:
        opened = step.inject(1, h)
    with memory.step(given) as step:
        closed = step.inject(1, h)
    assert torch.equal(closed[given.dead], h[given.dead])
    assert torch.equal(closed[~given.dead], opened[~given.dead])
    assert not torch.equal(opened[given.dead], h[given.dead])


def test_steps_out_of_order_are_refused(memory: EngramMemory, hidden: Hidden) -> None:
    step = memory.step(batch(3))
    with pytest.raises(StepError, match=r"call start\(\) or enter it first"):
        step.inject(1, hidden(3))
    with step:
        with pytest.raises(StepError, match="started already"):
            step.start()
        later = memory.step(batch(3))
        later.start()
        with pytest.raises(StepError, match="a later step overtook it"):
            step.inject(1, hidden(3))
    with later:
        later.inject(1, hidden(3))
    with pytest.raises(StepError, match="it has ended"):
        later.inject(14, hidden(3))


def test_a_refused_argument_loses_nothing(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    with memory.step(given) as step:
        for wrong in (hidden(3), h.float(), h[:, :2]):
            with pytest.raises(InvalidArgumentError, match="^hidden_states"):
                step.inject(1, wrong)
        found = step.inject(1, h)
    assert torch.equal(found, memory.layers[1](h, memory.hasher(given)[:, 0]))


@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("what", ["wkv", "table"])
def test_a_reload_in_mid_step_gives_the_new_result(
    memory: EngramMemory, hidden: Hidden, tokens: int, what: str
) -> None:
    given, h = batch(tokens), hidden(tokens)
    part = "wkv." if what == "wkv" else "embed."
    with memory.step(given) as step:
        fresh = {name: t for name, t in weights(memory.config, 9).items() if part in name}
        assert memory.load_weights(fresh.items()) == set(fresh)
        found = step.inject(1, h)
    assert torch.equal(found, memory.layers[1](h, memory.hasher(given)[:, 0]))


def test_names_of_converters(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(6), hidden(6)
    expected = alone(memory, given, h)
    renamed = {}
    for name, tensor in weights(memory.config).items():
        name = "model." + name.replace("embed.", "embed_tokens.")
        renamed[name.replace("wkv.scale", "wkv.weight_scale_inv")] = tensor
    other = EngramMemory(memory.config, memory.token_map, memory.backend, max_tokens=64)
    unrelated = {"layers.1.attn.wq.weight": torch.zeros(1), "layers.3.engram.q_weight": torch.zeros(1)}
    assert other.load_weights([*unrelated.items(), *renamed.items()]) == set(renamed)
    assert torch.equal(alone(other, given, h), expected)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("layers.1.engram.embed.weight", torch.zeros(59, 32).to(torch.float8_e4m3fn), r"embed\.weight: got \[59, 32\]"),
        ("layers.1.engram.embed.scale", torch.zeros(60, 1), r"embed\.scale: got \[60, 1\] float32"),
        ("layers.1.engram.q_weight", torch.zeros(4, 63), r"q_weight: got \[4, 63\]"),
        ("layers.1.engram.wkv.weight", torch.zeros(320, 128).to(torch.float8_e4m3fn), "a weight without its scale"),
        ("layers.1.engram.wkv.scale", torch.zeros(10, 4, dtype=torch.uint8), "a scale without its weight"),
    ],
)
def test_wrong_tensors_are_named(memory: EngramMemory, name: str, tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        memory.load_weights([(name, tensor)])


def test_weights_that_were_never_loaded_can_not_pass_for_a_result(
    config: EngramConfig, token_map: TokenMap, backend: EngramBackend, hidden: Hidden
) -> None:
    memory = EngramMemory(config, token_map, backend, max_tokens=8)
    with pytest.raises(StepError, match="no weights were loaded"), memory.step(batch(3)):
        pass
    loaded = {name: t for name, t in weights(config).items() if "_weight" not in name}
    memory.load_weights(loaded.items())
    with memory.step(batch(3)) as step:
        assert bool(step.inject(1, hidden(3)).isnan().all())


def test_a_stage_holds_its_own_layers_and_hashes_as_the_whole(memory: EngramMemory, hidden: Hidden) -> None:
    stage = EngramMemory(memory.config, memory.token_map, memory.backend, layer_ids=[14], max_tokens=8)
    assert stage.load_weights(weights(memory.config).items()) == {n for n in weights(memory.config) if ".14." in n}
    given, h = batch(4), hidden(4)
    with stage.step(given) as step:
        assert step.inject(1, h) is h
        found = step.inject(14, h)
    assert torch.equal(found, memory.layers[14](h, memory.hasher(given)[:, 1]))


@pytest.mark.parametrize("placement", ["host", "shared", "file"])
def test_placements(memory: EngramMemory, hidden: Hidden, tmp_path: Path, placement: str) -> None:
    given, h = batch(6), hidden(6)
    path = None
    if placement == "file":
        path = tmp_path / "layer-{layer_id}.rows"
        for layer_id, layer in memory.layers.items():
            (tmp_path / f"layer-{layer_id}.rows").write_bytes(layer.table.packed.numpy().tobytes())
    other = EngramMemory(memory.config, memory.token_map, memory.backend, placement, max_tokens=8, table_path=path)
    given_weights = weights(memory.config)
    other.load_weights((n, t) for n, t in given_weights.items() if placement != "file" or "embed" not in n)
    assert torch.equal(alone(other, given, h), alone(memory, given, h))


def test_a_capture_is_refused_before_another_stream_is_drawn_into_it(
    config: EngramConfig, token_map: TokenMap, backend: EngramBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").write_bytes(bytes(config.num_embeddings[0] * 33))
    memory = EngramMemory(config, token_map, backend, "file", layer_ids=[1], table_path=tmp_path / "{layer_id}")
    monkeypatch.setattr("engram_core.table.is_capturing", lambda device: True)
    monkeypatch.setattr(backend, "lookup_stream", lambda: pytest.fail("a stream was asked for"))
    with pytest.raises(TableError, match="^lookup: .*can't be captured"):
        memory.step(batch(4)).start()


def test_warmup(memory: EngramMemory) -> None:
    memory.warmup([0, 1, 20])
    with pytest.raises(InvalidArgumentError, match="^token_counts: got 65"):
        memory.warmup([65])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_ids": [2]}, "^layer_ids: got .2."),
        ({"max_tokens": 0}, "^max_tokens"),
        ({"prefetch_rows": -1}, "^prefetch_rows"),
        ({"placement": "file", "table_path": "x"}, "^table_path: got 'x'; need a path that holds"),
        ({"placement": "file", "table_path": {1: "x"}}, "^table_path.*one for layer 14"),
        ({"placement": "file"}, "^path"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    config: EngramConfig, token_map: TokenMap, backend: EngramBackend, change: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        EngramMemory(config, token_map, backend, **change)  # type: ignore[arg-type]


def test_all_reasons_are_given_before_anything_is_allocated(
    config: EngramConfig, token_map: TokenMap, backend: EngramBackend
) -> None:
    with pytest.raises(UnsupportedConfigError, match="no-hot-rows: .*cache_bytes=5") as error:
        EngramMemory(config, token_map, backend, "host", cache_bytes=5)
    assert [reason.code for reason in error.value.reasons] == ["no-hot-rows"]


def test_host_ids_of_what_is_no_batch_are_refused(memory: EngramMemory) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^batch: got .*need a TokenBatch"):
        memory.hash_on_host(torch.arange(3))  # type: ignore[arg-type]


def test_a_missing_table_file_is_named(config: EngramConfig, token_map: TokenMap, backend: EngramBackend) -> None:
    with pytest.raises(TableError, match=r"^nowhere/1\.rows: No such file"):
        EngramMemory(config, token_map, backend, "file", table_path="nowhere/{layer_id}.rows")


def test_too_many_tokens_are_refused(memory: EngramMemory) -> None:
    with pytest.raises(InvalidArgumentError, match="^batch: got 65 tokens; need at most max_tokens = 64"):
        memory.step(batch(65))


def test_freed_inputs_change_nothing(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(4), hidden(4)
    expected = memory.layers[1](h, memory.hasher(given)[:, 0])
    scratch = TokenBatch.single(given.input_ids.clone())
    with memory.step(scratch) as step:
        scratch.input_ids.fill_(63)
        assert torch.equal(step.inject(1, h), expected)


def test_one_and_three_layers(token_map: TokenMap, backend: EngramBackend, hidden: Hidden) -> None:
    for layer_ids in ((3,), (0, 2, 5)):
        memory = filled(EngramMemory(tiny_config(layer_ids=layer_ids), token_map, backend, max_tokens=8))
        given, h = batch(5), hidden(5)
        with memory.step(given) as step:
            found = h
            for layer_id in range(6):
                found = step.inject(layer_id, found)
        assert torch.equal(found, alone(memory, given, h))


def test_a_start_that_fails_half_way_leaves_no_step_behind(
    memory: EngramMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = list(memory.layers.values())[-1]

    def fail(*arguments: object) -> None:
        raise TableError("no rows")

    monkeypatch.setattr(last, "prepare", fail)
    with pytest.raises(TableError, match="no rows"), memory.step(TokenBatch.single(torch.arange(3))):
        pass
    assert memory.current_step is None
    monkeypatch.undo()
    with memory.step(TokenBatch.single(torch.arange(3))) as step:
        assert len(step.hash_ids) == len(memory.layers)


def test_a_table_with_a_cache_is_not_made_where_hot_rows_are_not_declared(backend: EngramBackend) -> None:
    with pytest.raises(UnsupportedConfigError, match="no-hot-rows"):
        backend.create_table(TableSpec(20, 64, (20,), "host", Parallel.single(), cache_bytes=1000))


def test_hits_and_hot_rows_of_a_memory_without_a_cache_are_refused(memory: EngramMemory) -> None:
    with pytest.raises(TableError, match="cache_hits: this table has no cache"):
        memory.cache_hits()
    with pytest.raises(InvalidArgumentError, match="hot: got None"):
        memory.cache_rows(None)  # type: ignore[arg-type]
