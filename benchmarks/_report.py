"""The markdown of ``step.py``: a section that can be put into RESULTS.md as it is."""

from __future__ import annotations

from typing import Any

_STEPS = "| decoder | T | mode | variant | alone | added | quartiles | bound | | hidden | possible | | host, alone |"
_PARTS = "| ranks | T | hash | look-up | WKV | gate | WKV bytes | floor |"
HIDDEN = 0.95


def markdown(facts: dict[str, Any]) -> str:
    """All that ``facts`` (the JSON) hold, as text and tables."""
    setting = (
        f"torch {facts['torch']}, backend {facts['backend']}, `benchmarks/step.py`: {facts['seconds']} s, medians of "
        f"{facts['rounds']} rounds in turn, every step with new tokens and a cold L2, in microseconds. Tables of "
        f"{facts['table_bytes'] / 1e9:.1f} GB (vocab_size {facts['vocab_size']}), placement {facts['placement']}."
    )
    columns = (
        "Added: median of the differences from the decoder alone, round by round. Bound: gates + max(0, (weight bytes "
        "of decoder and WKV) / 4.3 TB/s - alone) + 3 % of alone. Hidden: 1 - (added - gates - hash) / (look-ups + "
        "WKVs), of the parts below; possible: as much of it as has a decoder layer to hide behind. Host: to launch. "
        "In mode `sync` the host's time counts, and nothing is judged."
    )
    waits = (
        f"* A wait of the decoder bound by latency: {facts['spin_us']:g} us. More than one rank: one process, a gather "
        f"is a local copy after {facts['gather_us']:g} us; links, other ranks' lateness and NCCL are left out."
    )
    lines = [f"# A decode step: {facts['device']}, {facts['date']}", "", setting, columns, ""]
    lines += [f"* `{name}`: {what}" for name, what in {**facts["decoders"], **facts["variants"]}.items()]
    lines += [waits, ""]
    for ranks in dict.fromkeys(step["ranks"] for step in facts["steps"]):
        steps = [step for step in facts["steps"] if step["ranks"] == ranks]
        lines += [f"## Rank 0 of {ranks}: time added to a step, us" if ranks > 1 else "## Time added to a step, us", ""]
        lines += [*_head(_STEPS), *(_step(step) for step in steps), ""]
    lines += ["## Parts by themselves, both layers together, us", "", *_head(_PARTS)]
    for part in facts["parts"]:
        times = " | ".join(f"{part[f'{name}_us']:.1f}" for name in ("hash", "lookup", "wkv", "gate"))
        size = part["wkv_bytes"]
        lines.append(f"| {part['ranks']} | {part['T']} | {times} | {size / 1e6:.1f} MB | {size / 4.3e6:.1f} |")
    judged = [step for step in facts["steps"] if step["variant"] != "inline"]
    lines += ["", *(f"* {name}: {_share(judged, name)}" for name in dict.fromkeys(step["variant"] for step in judged))]
    failures = facts["failures"]
    lines.append(
        f"* Hidden states: {'; '.join(failures) if failures else 'the same bits in line and in every variant'}"
    )
    return "\n".join(lines) + "\n"


def within(step: dict[str, Any]) -> bool | None:
    """Whether the bound is kept; None: it does not apply."""
    if step["bound_us"] is None or step["variant"] == "inline":
        return None
    return bool(step["added_us"] <= step["bound_us"])


def hides(step: dict[str, Any]) -> bool | None:
    """Whether 95 % are hidden; None: that does not apply, or there is too little to hide behind."""
    if within(step) is None or not step["idle"] or step["possible"] < HIDDEN:
        return None
    return bool(step["hidden"] >= HIDDEN)


def _share(steps: list[dict[str, Any]], variant: str) -> str:
    said = []
    for what, judge in (("within the bound", within), (f"{HIDDEN:.0%} hidden", hides)):
        judged = [verdict for step in steps if step["variant"] == variant and (verdict := judge(step)) is not None]
        said.append(f"{what} in {sum(judged)} of {len(judged)} cases")
    return ", ".join(said)


def _step(step: dict[str, Any]) -> str:
    words = {None: "", True: "met", False: "**missed**"}
    bound, hidden, possible = "", "", ""
    if step["bound_us"] is not None:
        bound, hidden, possible = f"{step['bound_us']:.1f}", f"{step['hidden']:.1%}", f"{step['possible']:.0%}"
    cells = [
        step["decoder"], str(step["T"]), step["mode"], step["variant"], f"{step['alone_us']:.0f}",
        f"**{step['added_us']:.1f}**", f"{step['added_low_us']:.1f}, {step['added_high_us']:.1f}", bound,
        words[within(step)], hidden, possible, words[hides(step)],
        f"{step['host_us']:.0f}, {step['host_alone_us']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _head(names: str) -> list[str]:
    return [names, "|" + "---|" * (names.count("|") - 1)]
