"""Records in, findings out."""

from collections.abc import Iterable
from pathlib import Path

from manyhands.diagnosis.finding import Finding
from manyhands.telemetry.lines import Record
from manyhands.telemetry.read import read


class Diagnosis:
    """What has been recorded of a run so far, and what is wrong with it."""

    def add(self, records: Iterable[Record]) -> None:
        """Take what has been recorded since the last call, in the order of time."""
        for _ in records:
            pass

    def findings(self) -> list[Finding]:
        """What is wrong now, the costliest first; nothing before there are enough steps to tell."""
        return []


def diagnose(run: Path) -> list[Finding]:
    """What is wrong with the run in that directory, the costliest first."""
    diagnosis = Diagnosis()
    diagnosis.add(read(run))
    return diagnosis.findings()
