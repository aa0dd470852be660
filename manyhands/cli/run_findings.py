"""What is wrong with a run, from its records, in words for a terminal."""

import sys
from pathlib import Path

from manyhands.diagnosis import Diagnosis, Finding
from manyhands.launching.words import width_of, wrapped
from manyhands.telemetry.read import read, read_ends

AT_THE_END = 2
AT_THE_END_BYTES = 8 << 20  # of records, which take about a second to read
WORTH_SAYING = 0.1  # of the time; what costs less is for `doctor`


def say_findings(run: Path) -> bool:
    """Print all of them; says whether there are any records to tell from."""
    diagnosis = Diagnosis()
    diagnosis.add(read(run))
    if not diagnosis.steps:
        return False
    found = diagnosis.findings()
    columns = width_of(sys.stdout)
    if not found:
        print(wrapped(f"nothing is wrong with {run}, as far as {diagnosis.steps:,} steps tell", columns))
    for finding in found:
        print(wrapped(f"{finding.kind}: {finding.sentence}", columns))
    return True


def worth_saying(run: Path) -> list[Finding]:
    """At the end of a run: the one or two that matter most."""
    diagnosis = Diagnosis()
    diagnosis.add(read_ends(run, AT_THE_END_BYTES))
    found = [one for one in diagnosis.findings() if one.share >= WORTH_SAYING or not one.share]
    return found[:AT_THE_END]
