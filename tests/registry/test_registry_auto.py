"""What auto takes on which machine, which device the backend gets, and that the CPU is never taken by accident."""

from __future__ import annotations

import pytest
import torch

from engram_core import _devices
from engram_core.errors import BackendConflictError, BackendUnavailableError, InvalidArgumentError
from engram_core.registry import State, choose, get_backend, list_backends


def test_without_an_accelerator_the_reference_runs(site):
    site.core()
    decision = choose()
    assert (decision.name, decision.device, decision.why) == (
        "reference",
        torch.device("cpu"),
        "no accelerator is visible",
    )
    assert get_backend().info.name == "reference"


@pytest.mark.parametrize("node", ["nvidiactl", "nvidia0", "kfd", "davinci0"])
def test_a_device_node_without_a_backend_refuses_with_the_table(site, node):
    site.core()
    (_devices.DEV / node).touch()
    with pytest.raises(BackendUnavailableError, match=f"an accelerator is visible .*{node}") as caught:
        get_backend()
    text = str(caught.value)
    assert "is a CPU build; a CUDA build is needed" in text or torch.version.cuda
    assert "To run the slow reference on purpose: ENGRAM_BACKEND=reference.   Details: engram-core doctor" in text
    assert choose(device="cpu").name == "reference"
    assert choose(device="cpu").why == "the device is a CPU"
    assert choose("reference").name == "reference"
    assert not any(d.chosen for d in list_backends())


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_device_that_the_user_hid_is_not_visible(site, monkeypatch, value):
    site.core()
    (_devices.DEV / "nvidiactl").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert choose().name == "reference"


def test_an_accelerator_of_torch_without_a_backend_refuses(site, monkeypatch):
    site.core()
    monkeypatch.setattr(_devices, "accelerator", lambda: torch.device("mps"))
    with pytest.raises(BackendUnavailableError, match="torch sees mps"):
        get_backend()


@pytest.mark.usefixtures("gpu")
def test_neither_a_cpu_backend_nor_any_other_takes_the_place_of_a_gpu(site):
    site.backend("acme", types=("cpu",), priority=50)
    site.core()
    with pytest.raises(BackendUnavailableError, match="an accelerator is visible"):
        choose()
    assert choose(device="cpu").name == "acme"
    with pytest.raises(BackendUnavailableError, match="auto: no available backend runs on device cuda"):
        choose(device="cuda:1")


@pytest.mark.usefixtures("gpu")
def test_the_backend_of_highest_priority_that_fits_the_device(site):
    site.backend("acme", types=("cuda",), priority=5)
    site.backend("best", types=("cuda", "cpu"), priority=7)
    site.backend("npu", types=("xpu",), priority=99)
    site.backend("sick", types=("cuda",), priority=98, extra="\ndef probe(): return (Reason('x', 'ill'),)")
    assert choose().name == "best"
    assert choose().device == torch.device("cuda", 0)
    assert choose(device="cuda").device == torch.device("cuda", 0)
    assert choose("acme", "cuda:1").device == torch.device("cuda", 1)
    assert choose(device="cpu").name == "best"


@pytest.mark.usefixtures("gpu")
def test_the_current_device_of_a_rank_is_kept(site, monkeypatch):
    site.backend("acme", types=("cuda",))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose(device="cuda").device == torch.device("cuda", 1)


def test_equal_priority_asks_to_choose(site):
    site.backend("acme", priority=5)
    site.backend("zeta", priority=5)
    site.core()
    with pytest.raises(BackendConflictError) as caught:
        get_backend()
    message = caught.value.message
    assert "acme (acme-engram 0.2) and zeta (zeta-engram 0.2) fit alike, with priority 5" in message
    assert "choose one: ENGRAM_BACKEND=acme or ENGRAM_BACKEND=zeta" in message
    assert get_backend("zeta").info.name == "zeta"


def test_a_backend_of_the_reference_priority_comes_before_it(site):
    site.backend("acme", priority=0)
    site.core()
    assert choose().name == "acme"


def test_a_device_that_the_backend_does_not_run_on(site):
    site.backend("acme", types=("xpu", "cpu"))
    with pytest.raises(BackendUnavailableError) as caught:
        get_backend("acme", "cuda")
    assert caught.value.reasons[0].message == "it runs on xpu, cpu; the device is cuda"
    assert "fix: pass device='xpu'" in str(caught.value)


def test_a_backend_whose_device_torch_can_not_see(site):
    site.backend("acme", types=("cuda",))
    with pytest.raises(BackendUnavailableError, match="runs on cuda, and torch sees no such device"):
        get_backend("acme")
    with pytest.raises(BackendUnavailableError, match="auto: no backend can run here"):
        get_backend()
    with pytest.raises(
        InvalidArgumentError, match=r"device: got 'cuda'; need a device of this machine; .* sees 0 cuda"
    ):
        get_backend("acme", "cuda")


def test_a_device_type_that_torch_does_not_know_stops_nobody(site):
    site.backend("acme", types=("dcu",), priority=9)
    site.backend("zeta")
    assert choose().name == "zeta"
    with pytest.raises(BackendUnavailableError, match="runs on dcu, and torch sees no such device"):
        get_backend("acme")


@pytest.mark.usefixtures("gpu")
def test_an_index_past_the_last_device(site):
    site.backend("acme", types=("cuda",))
    with pytest.raises(InvalidArgumentError, match=r"device: got 'cuda:2'.* sees 2 cuda device"):
        get_backend("acme", "cuda:2")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", 1.5, True, b"cpu"])
def test_a_device_that_is_none(site, device):
    site.backend("acme")
    with pytest.raises(InvalidArgumentError, match=r"device: got .*; need a torch device"):
        get_backend("acme", device)


def test_the_interpreter_takes_a_cpu_by_name_and_never_by_auto(site, monkeypatch):
    site.backend("acme", types=("cuda",), priority=50, interpretable=True)
    site.backend("plain", types=("cuda",))
    site.core()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose().name == "reference"
    for decision in (choose("acme"), choose("acme", "cpu")):
        assert (decision.device, decision.interpreted) == (torch.device("cpu"), True)
        assert decision.to_json()["interpreted"] is True
    assert "interpreted (TRITON_INTERPRET is set)" in choose("acme").report.table()
    with pytest.raises(BackendUnavailableError, match="runs on cuda; the device is cpu"):
        choose("plain", "cpu")
    plainly = get_backend("acme")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailableError, match="runs on cuda; the device is cpu"):
        choose("acme", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert get_backend("acme") is plainly


@pytest.mark.usefixtures("gpu")
def test_a_forgotten_interpreter_variable_puts_no_gpu_server_into_the_interpreter(site, monkeypatch):
    site.backend("acme", types=("cuda",), interpretable=True)
    assert choose().device == torch.device("cuda", 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendUnavailableError, match="interpreted"):
        choose()


@pytest.mark.parametrize("name", ["nvidia", "rocm"])
def test_the_vendor_backends_show_every_reason_of_this_machine(site, monkeypatch, name):
    site.core()
    status = next(d for d in list_backends() if d.name == name)
    assert status.state is State.UNAVAILABLE
    assert "no-device" in {reason.code for reason in status.reasons}
    assert all(reason.fix for reason in status.reasons)
