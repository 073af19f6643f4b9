"""Objects made, dropped and made again; forks, threads and several devices."""

from __future__ import annotations

from engram_conformance.cases.model import Case, Tolerance


def _case(name: str, says: str, tolerance: Tolerance = Tolerance.EXACT, geometry: str = "small") -> Case:
    return Case(f"lifecycle-{name}", "lifecycle", name.replace("-", "_"), says, geometry, tolerance=tolerance)


CASES = (
    _case(
        "ten-times",
        "A memory made, run and dropped ten times: the same bits, and nothing is kept alive.",
        geometry="one",
    ),
    _case("side-by-side", "Memories of two geometries, used in turn.", Tolerance.LAYER),
    _case("own-object", "A backend object made apart from the registry's gives the same bits."),
    _case("same-object", "The registry gives one object for a name and a device, whose device has an index."),
    _case("other-thread", "A memory made in one thread runs in another."),
    _case("two-devices", "Two devices of one process, used in turn.", Tolerance.LAYER),
    _case("after-fork", "A process that listed the backends forks; its child runs one.", Tolerance.LAYER),
)
