"""``engram-core run``: the main job on real text, checked against float64."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from engram_core.cli.failure import CliError, bad_input

if TYPE_CHECKING:
    from engram_core.cli.report import RunReport

CHECKED_TOKENS: Final = 64


def run(
    text: Annotated[str | None, typer.Option(metavar="FILE|-", help="UTF-8 text; default: a shipped one.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json; default: DeepSeek V4's (extra demo).")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="config.json with engram_* keys; default: V4.1, small tables.")
    ] = None,
    vocab_size: Annotated[
        str | None, typer.Option(metavar="N", help="engram_vocab_size: scales the tables and nothing else.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: ENGRAM_BACKEND, else the best that is available.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="A torch device, such as cpu or cuda:1.")] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="Of the random weights.")] = "0",
    step_tokens: Annotated[str, typer.Option(metavar="N", help="Tokens of a prefill step.")] = "512",
    check_tokens: Annotated[
        str, typer.Option(metavar="N|all", help="Tokens whose WKV and gate are compared; ids and rows: always all.")
    ] = str(CHECKED_TOKENS),
    as_json: Annotated[bool, typer.Option("--json", help="Print data in place of text.")] = False,
) -> None:
    """Run a text through every Engram layer on one backend, and compare with an independent float64 computation."""
    begin = time.perf_counter()
    numbers = (
        None if vocab_size is None else _number("--vocab-size", vocab_size, 2, 2**32),
        _number("--seed", seed, 0, 2**63 - 1),
        _number("--step-tokens", step_tokens, 1, 2**16),
        None
        if check_tokens.strip().lower() == "all"
        else _number("--check-tokens", check_tokens, 1, 2**20, ", or all,"),
    )
    try:
        report = _run(text, tokenizer, config, backend, device, *numbers, begin)
    except MemoryError:
        raise CliError("out of memory; pass a smaller --vocab-size or --step-tokens") from None
    if as_json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        report.print()
    raise typer.Exit(0 if report.passed else 1)


def _number(option: str, value: str, least: int, most: int, other: str = "") -> int:
    """A whole number in decimal; typer's own message does not say what came."""
    stripped = value.strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) < 20 and least <= int(stripped) <= most:
        return int(stripped)
    shown = value if len(value) <= 40 else f"{value[:40]}..."
    raise CliError(f"{option} is {shown!r}; a number from {least} to {most}{other} is needed")


def _run(
    text_path: str | None,
    tokenizer_path: str | None,
    config_path: str | None,
    backend_name: str | None,
    device: str | None,
    vocab_size: int | None,
    seed: int,
    step_tokens: int,
    wanted: int | None,
    begin: float,
) -> RunReport:
    with _status("reading"):
        from engram_core.cli import inputs
        from engram_core.cli.memory import DEMO_VOCAB_SIZE, check_fits
        from engram_core.registry import choose, get_backend

        # Cheap refusals first: nobody waits for a tokenizer to learn that a file is missing.
        text = inputs.read_text(text_path)
        model = inputs.read_config(config_path, vocab_size, DEMO_VOCAB_SIZE)
        with bad_input("--device" if device else ""):
            decision = choose(backend_name, device)
            chosen = get_backend(decision.name, decision.device)
        check_fits(model, decision.device, config_path or "configuration")
        inputs.check_rows(model, config_path)
        tokens = inputs.read_tokens(tokenizer_path, text, model)

    from engram_core.cli.job import AHEAD_TOKENS, run_steps, spans
    from engram_core.cli.judge import Judge, sample
    from engram_core.cli.report import LayerReport, RunReport
    from engram_core.memory import EngramMemory
    from engram_core.synthetic import Synthetic

    steps = spans(len(tokens.ids), step_tokens)
    checked = sample(len(tokens.ids), wanted)
    synthetic = Synthetic(model, seed)
    with _status("filling the tables"):
        longest = max(stop - start for start, stop in steps)
        memory = EngramMemory(model, tokens.map, chosen, max_tokens=longest, prefetch_rows=AHEAD_TOKENS)
        synthetic.load(memory)
        if chosen.device.type != "cpu":  # compilation is not what the clock is to show
            memory.warmup(sorted({stop - start for start, stop in steps}))
        judge = Judge(synthetic, tokens.map, tokens.ids, checked)
        for layer in memory.layers.values():
            judge.check_layout(layer.wkv)
    ready = time.perf_counter()
    with _status(f"{len(tokens.ids)} tokens on {decision.name}"):
        times = run_steps(memory, synthetic, tokens.ids, steps, judge)
    del memory, layer  # the judge draws the weights again; both at once would be twice the memory
    done = time.perf_counter()
    layers = []
    for index, layer_id in enumerate(model.layer_ids):
        with _status(f"checking layer {layer_id} in float64"):
            verdicts, gate = judge.judge(layer_id)
        layers.append(
            LayerReport(
                layer_id=layer_id,
                tokens=len(tokens.ids),
                table_rows=model.num_embeddings[index],
                distinct_rows=judge.distinct_rows(layer_id),
                seconds={
                    "hash_all_layers": times.hash,
                    "lookup": times.lookup[layer_id],
                    "wkv": times.wkv[layer_id],
                    "gate": times.gate[layer_id],
                },
                gate=gate,
                checks=verdicts,
            )
        )
    end = time.perf_counter()
    seconds = {"setup": ready - begin, "steps": done - ready, "check": end - done, "total": end - begin}
    return RunReport(decision, model, text, tokens, seed, steps, len(checked), layers, seconds)


@contextmanager
def _status(what: str) -> Iterator[None]:
    """A line on a terminal's standard error while work is going on; nothing elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
