"""The backend: architectures judged on a chosen device, options, which prefetch, and the order of events on streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engram_rocm import arch
from engram_rocm.backend import RocmBackend
from engram_rocm.weights import CodedWeight
from engram_rocm.wkv import RocmWkv
from models import filled, tiny_config
from played import CPU, Seat

from engram_core import EngramMemory, Parallel, TokenBatch, TokenMap, get_backend
from engram_core.backend import WkvSpec
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.gpu.prefetch import SideStreamPrefetch
from engram_core.prefetch import InlinePrefetch
from engram_core.specs import Problem

CONFIG = tiny_config()


def memory(**options: Any) -> EngramMemory:
    options.setdefault("backend", RocmBackend(CPU))
    return filled(EngramMemory(CONFIG, TokenMap.identity(64, 2), max_tokens=32, **options))


def test_the_registry_gives_it_by_name_in_the_interpreter() -> None:
    backend = get_backend("rocm")
    assert isinstance(backend, RocmBackend)
    assert (backend.device, backend.architecture) == (CPU, "gfx942")
    assert backend.supports(Problem(CONFIG, Parallel.single())) == ()


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("gfx1100", "architecture-rdna", "cpu is gfx1100, an RDNA GPU: waves of 32 lanes"),
        ("gfx1201", "architecture-rdna", "gfx1201"),
        ("gfx906", "architecture", "cpu is gfx906, which no kernel here was made for; needed is gfx90a (CDNA2"),
        ("gfx9999", "architecture", "gfx9999"),
        ("", "no-amd-gpu", "cpu is no AMD GPU"),
    ],
)
def test_other_architectures_are_refused_with_reason_and_fix(
    monkeypatch: pytest.MonkeyPatch, name: str, code: str, said: str
) -> None:
    monkeypatch.setattr(arch, "detect", lambda device: name)
    backend = RocmBackend(CPU)
    (reason,) = backend.supports(Problem(CONFIG, Parallel.single()))
    assert reason.code == code
    assert said in reason.message
    assert "gfx942 (CDNA3, Instinct MI300), gfx950 (CDNA4, Instinct MI350)" in reason.message
    assert "rocminfo" in reason.fix
    with pytest.raises(UnsupportedConfigError, match=code):
        backend.create_wkv(WkvSpec(64, 64, 4, Parallel.single()))
    with pytest.raises(UnsupportedConfigError, match=code):
        EngramMemory(CONFIG, TokenMap.identity(64, 2), backend)


def test_the_gfx_name_is_read_without_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = "gfx950:sramecc+:xnack-"  # noqa: N815

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.version, "hip", "7.1.5")
    assert arch.detect(torch.device("cuda", 0)) == "gfx950"
    # A CUDA build has such a field too, and it names no AMD GPU.
    monkeypatch.setattr(torch.version, "hip", None)
    assert arch.detect(torch.device("cuda", 0)) == ""


@pytest.mark.parametrize(
    ("name", "weights", "coded", "sliced"),
    [
        ("gfx942", None, False, True),
        ("gfx942", "fp8", True, True),
        ("gfx950", None, True, True),
        ("gfx950", "bf16", False, True),
        ("gfx90a", None, False, False),
    ],
)
def test_what_each_architecture_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, weights: Any, coded: bool, sliced: bool
) -> None:
    monkeypatch.setattr(arch, "detect", lambda device: name)
    wkv = RocmBackend(CPU, weights=weights).create_wkv(WkvSpec(128, 64, 4, Parallel(Seat(0, 2))))
    assert isinstance(wkv, RocmWkv)
    wkv.load(torch.zeros(320, 128).to(torch.float8_e4m3fn), torch.full((10, 4), 127, dtype=torch.uint8))
    assert isinstance(wkv._weight, CodedWeight) == coded
    assert wkv.split.sliced == sliced
    assert wkv.accepts_packed
    assert wkv.side_stream_safe


def test_an_unknown_form_of_weights_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="^weights: got 'int4'"):
        RocmBackend(CPU, weights="int4")  # type: ignore[arg-type]


def test_warm_up_connects_the_communicator_of_the_side_stream() -> None:
    class Counting(Seat):
        calls = 0

        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            self.calls += 1
            return torch.cat([x, x], dim)

    tensor, ahead = Counting(0, 2), Counting(0, 2)
    held = memory(parallel=Parallel(tensor, ahead=ahead))
    held.warmup([0, 3])
    assert ahead.calls == 1  # both layers share it
    assert tensor.calls == 4  # of each layer with tokens the rows and the gate's sums; columns are whole on no rank


class Log(list[tuple[Any, ...]]):
    """What happened on streams, in order."""


class FakeStream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def __enter__(self) -> FakeStream:
        self.log.append(("enter", self.name))
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append(("exit", self.name))

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("wait_stream", self.name, other.name))

    def wait_event(self, event: str) -> None:
        self.log.append(("wait_event", self.name, event))

    def record_event(self) -> str:
        self.events += 1
        self.log.append(("record", self.name, f"event {self.events}"))
        return f"event {self.events}"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    main = FakeStream(log, "main")
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, "side"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    return log


def test_each_chain_has_an_event_of_its_own(log: Log) -> None:
    plain, held = memory(prefetch_rows=0), memory()
    assert isinstance(held.prefetch, InlinePrefetch)
    held.prefetch = SideStreamPrefetch(list(held.layers.values()), 16, CPU)
    hidden = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = TokenBatch.single(torch.arange(5))
    with plain.step(batch) as step:
        expected = step.inject(14, step.inject(1, hidden))
    with held.step(batch) as step:
        assert log == [
            ("wait_stream", "side", "main"),
            ("enter", "side"),
            ("record", "side", "event 1"),
            ("record", "side", "event 2"),
            ("exit", "side"),
        ]
        log.clear()
        first = step.inject(1, hidden)
        assert log == [("wait_event", "main", "event 1")]
        assert torch.equal(step.inject(14, first), expected)
        assert log == [("wait_event", "main", "event 1"), ("wait_event", "main", "event 2")]
    assert len(log) == 2


def test_a_deferred_chain_follows_what_the_stream_holds_when_it_is_started(log: Log) -> None:
    held = memory()
    held.prefetch = SideStreamPrefetch(list(held.layers.values()), 16, CPU)
    hidden = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = TokenBatch.single(torch.arange(5))
    with held.step(batch) as step:
        expected = step.inject(14, step.inject(1, hidden))
    log.clear()
    one = [("wait_stream", "side", "main"), ("enter", "side"), ("record", "side", "event 3"), ("exit", "side")]
    with held.step(batch, defer_chains=True) as step:
        assert log == []
        step.start_chain(1)
        step.start_chain(1)
        assert log == one
        first = step.inject(1, hidden)
        assert log == [*one, ("wait_event", "main", "event 3")]
        assert torch.equal(step.inject(14, first), expected)  # never started: in line
        step.start_chain()  # both were reached
        assert len(log) == 5
    with held.step(batch, defer_chains=True) as step:
        step.start_chain()
        log.clear()
    assert log == [("wait_event", "main", "event 4")]  # the end joins it


def test_join_waits_for_chains_that_no_layer_took(log: Log) -> None:
    held = memory()
    held.prefetch = SideStreamPrefetch(list(held.layers.values()), 16, CPU)
    with held.step(TokenBatch.single(torch.arange(3))) as step:
        log.clear()
        step.inject(14, torch.zeros(3, 4, 64, dtype=torch.bfloat16))
    assert log == [("wait_event", "main", "event 2"), ("wait_event", "main", "event 1")]
    assert not any(held.prefetch.started(layer) for layer in held.layers.values())


def test_more_rows_than_its_limit_start_nothing(log: Log) -> None:
    held = memory()
    held.prefetch = SideStreamPrefetch(list(held.layers.values()), 2, CPU)
    with held.step(TokenBatch.single(torch.arange(3))) as step:
        assert not any(entry[0] == "record" for entry in log)
        step.inject(1, torch.zeros(3, 4, 64, dtype=torch.bfloat16))
    assert not any(entry[0] == "wait_event" for entry in log)


def test_a_layer_that_can_not_run_ahead_is_refused() -> None:
    held = memory(parallel=Parallel(Seat(0, 2)))
    assert held.prefetch is None
    with pytest.raises(UnsupportedConfigError, match="no-ahead-communicator"):
        SideStreamPrefetch(list(held.layers.values()), 4, CPU)
