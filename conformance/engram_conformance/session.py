"""What the plugin does once ``--engram-backend`` is given: parametrise, judge, sum up, report.

Verdicts travel in each test report's ``user_properties``, so that pytest-xdist works as usual.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from typing import Any

import pytest

from engram_conformance import expectations, report
from engram_conformance.cases import ALL
from engram_conformance.cases.model import Case, Size
from engram_conformance.declared import verify_refusal
from engram_conformance.subject import Subject
from engram_conformance.verdicts import Record, RefusedAsDeclared, Verdict, number_to_json
from engram_core import registry
from engram_core.backend import EngramBackend
from engram_core.errors import BackendError, EngramError, UnknownBackendError

UNAVAILABLE = 3
NOTHING_EXECUTED = 1
_PROPERTY = "engram-conformance"
_RECORD = pytest.StashKey[Record]()


class ConformanceSession:
    """The pytest hooks of one run against one backend."""

    def __init__(self, config: pytest.Config, backend: EngramBackend, decision: registry.Decision) -> None:
        self.backend = backend
        self.decision = decision
        self.interpreted = decision.interpreted
        size = config.getoption("engram_size") or (Size.SMALL if self.interpreted else Size.FULL)
        self.size = Size(size)
        self.cases = {case.id: case for case in ALL}
        device_type = backend.device.type
        self.expected = expectations.read(
            expectations.find(decision.name), self.cases, interpreted=self.interpreted, device_type=device_type
        )
        self.events = config.getoption("engram_events")
        self.results: dict[str, report.CaseResult] = {}
        self.began = time.time()

    @classmethod
    def start(cls, config: pytest.Config) -> ConformanceSession:
        """Open the backend; a backend that can't run ends the run with the registry's table and exit code 3."""
        name, device = config.getoption("engram_backend"), config.getoption("engram_device")
        try:
            decision = registry.choose(name, device)
            return cls(config, registry.get_backend(name, device), decision)
        except UnknownBackendError as error:
            raise pytest.UsageError(str(error)) from None
        except BackendError as error:
            pytest.exit(f"engram conformance: {error}", returncode=UNAVAILABLE)
        except (EngramError, expectations.ExpectationsError) as error:
            raise pytest.UsageError(str(error)) from None

    # Collection: each test function gets the cases of its area and check.

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "subject" not in metafunc.fixturenames:
            return
        area = metafunc.module.__name__.rpartition(".test_")[2]
        check = metafunc.function.__name__.removeprefix("test_")
        cases = [case for case in ALL if (case.area, case.check) == (area, check)]
        metafunc.parametrize(
            "case", [pytest.param(case, marks=self._marks(case)) for case in cases], ids=lambda c: c.id
        )

    def _marks(self, case: Case) -> list[pytest.MarkDecorator]:
        if case.id in self.expected:
            return [pytest.mark.xfail(reason=self.expected[case.id], strict=True)]
        return []

    @pytest.fixture
    def subject(self, case: Case, request: pytest.FixtureRequest) -> Subject:
        record = request.node.stash.setdefault(_RECORD, Record())
        return Subject(self.backend, self.interpreted, case, record)

    # Execution.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        case = _case(item)
        if case is None:
            return
        item.stash[_RECORD] = Record()
        if case.size.rank > self.size.rank:
            where = ", Triton's interpreter" if self.interpreted else ""
            pytest.skip(f"size {case.size}; this run goes up to {self.size}{where}")
        if case.since > self.backend.info.api_version:
            since, spoken = (".".join(map(str, v)) for v in (case.since, self.backend.info.api_version))
            pytest.skip(f"asked for from interface {since} on; the backend speaks {spoken}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """A case whose capability is not declared becomes the check that it is refused."""
        case = _case(pyfuncitem)
        missing = case.needs - self.backend.info.capabilities if case is not None else frozenset()
        if case is None or not missing:
            return None
        subject = pyfuncitem.funcargs["subject"]
        assert isinstance(subject, Subject)
        subject.record.refusal = verify_refusal(subject, missing)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            return (yield)
        except RefusedAsDeclared as refused:
            item.stash[_RECORD].refusal = str(refused)
            return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        result = yield
        case = _case(item)
        if case is not None and (call.when == "call" or result.outcome != "passed"):
            found = self._verdict(case, item.stash.get(_RECORD, Record()), result)
            result.user_properties.append((_PROPERTY, found))
        return result

    def _verdict(self, case: Case, record: Record, result: pytest.TestReport) -> dict[str, Any]:
        if result.outcome == "failed":
            verdict, reason = Verdict.FAILED, _failure(result)
        elif hasattr(result, "wasxfail"):
            verdict, reason = Verdict.EXPECTED_FAILURE, str(result.wasxfail).removeprefix("reason: ")
        elif result.outcome == "skipped":
            verdict, reason = Verdict.NOT_RUN, _skipped(result)
        elif record.refusal:
            verdict, reason = Verdict.REFUSED, record.refusal
        elif record.checks == 0:
            # A case that compared nothing proves nothing: that is a fault of the suite, and shown as one.
            verdict, reason = Verdict.FAILED, "the case made no comparison"
            result.outcome = "failed"
            result.longrepr = reason
        else:
            verdict, reason = Verdict.PASSED, ""
        return {
            "id": case.id,
            "verdict": str(verdict),
            "worst": number_to_json(record.worst),
            "equal": record.equal,
            "seconds": round(result.duration, 4),
            "reason": reason,
        }

    # Summing up, on the controller.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, found in report.user_properties:
            if name == _PROPERTY and isinstance(found, dict):
                self._take(found)

    def _take(self, found: dict[str, Any]) -> None:
        case = self.cases[found["id"]]
        before = self.results.get(case.id)
        if before is not None and before.verdict == Verdict.FAILED:
            return  # a teardown that fails after the call did
        self.results[case.id] = report.CaseResult.of(case, found)
        if self.events:
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.events and not hasattr(session.config, "workerinput"):
            total = sum(_case(item) is not None for item in session.items)
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(json.dumps({"total": total}) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        if hasattr(config, "workerinput"):
            return
        executed = any(result.verdict != Verdict.NOT_RUN for result in self.results.values())
        if not executed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = NOTHING_EXECUTED
        self.report = report.Report.of(self.decision, self.backend, self.results.values(), self.size, self.began)
        if path := config.getoption("engram_report"):
            report.write(self.report, path)
        if path := config.getoption("engram_html"):
            from engram_conformance import html

            html.write([self.report], path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        found = getattr(self, "report", None)
        if found is not None:
            bad = found.counts[Verdict.FAILED] or not found.executed
            terminalreporter.ensure_newline()
            terminalreporter.write_line(found.summary(), red=bool(bad), green=not bad, bold=True)


def _case(item: pytest.Item) -> Case | None:
    call = getattr(item, "callspec", None)
    case = call.params.get("case") if call is not None else None
    return case if isinstance(case, Case) else None


def _failure(result: pytest.TestReport) -> str:
    crash = getattr(result.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(result.longrepr)
    return text.removeprefix("AssertionError: ").split("\nassert ")[0].strip()


def _skipped(result: pytest.TestReport) -> str:
    parts = result.longrepr
    return str(parts[2] if isinstance(parts, tuple) else parts).removeprefix("Skipped: ")
