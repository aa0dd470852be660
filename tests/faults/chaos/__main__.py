"""Attack what is registered: `python -m tests.faults.chaos --deaths 400`.

Set-ups take turns, and each run has a seed, which is printed and decides everything but the machine's part: try one
again with `--seed N --runs 1`. What happened in each run goes to build/chaos.jsonl, and one summary of all of them to
benchmarks/results/chaos.json with `--keep`. A run that does not keep what the pages promise makes the whole fail.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.summaries import RESULTS, encode, summary
from manyhands.lab import emulated_hosts
from tests.faults.chaos import attacks, record, setups
from tests.faults.chaos.setups import SetUp

RECORDS = Path("build") / "chaos.jsonl"


def every_setup(where: str) -> list[SetUp]:
    """Those of one place, or of all in turns, so that a short run meets each of them too."""
    places = {"one host": setups.one_host, "parts": setups.in_parts, "hosts": setups.on_hosts}
    if emulated_hosts.available():
        print(f"without hosts: {emulated_hosts.available()}", file=sys.stderr)
        del places["hosts"]
    found = [make() for name, make in places.items() if where in ("all", name.replace(" ", "-"))]
    longest = max(map(len, found))
    return [group[turn % len(group)] for turn in range(longest) for group in found]


def one(setup: SetUp, seed: int) -> tuple[dict[str, Any], bool]:
    """One run; what is known of it, and whether it has kept what is promised."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        try:
            ran, faults = attacks.attack(setup, seed, folder)
            record.check(setup, ran)
        except Exception as error:
            traceback.print_exc()
            failed = {"seed": seed, "set-up": str(setup), "error": record.error_line(error, folder)}
            return {**failed, "details": str(error)[-5000:]}, False
        return record.record(setup, seed, ran, faults, time.monotonic() - began_s), True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--deaths", type=int, default=400, help="how many are enough (default 400)")
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="how many runs are enough")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default 0)")
    parser.add_argument("--where", choices=["all", "one-host", "parts", "hosts"], default="all")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/chaos.json")
    options = parser.parse_args()
    every = every_setup(options.where)
    kept: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    RECORDS.parent.mkdir(exist_ok=True)
    deaths, seed = 0, options.seed
    with RECORDS.open("w") as records:
        while deaths < options.deaths and seed < options.seed + options.runs:
            setup = every[seed % len(every)]
            told, ok = one(setup, seed)
            (kept if ok else failed).append(told)
            records.write(json.dumps(told) + "\n")
            records.flush()
            deaths += told.get("deaths", 0)
            what = (
                f"{', '.join(told['kinds'])}; {told['seconds']:.0f} s" if ok else f"FAILED: {told['error']}"
            )
            print(f"seed {seed}: {setup}: {what}; {deaths} of {options.deaths} deaths", flush=True)
            seed += 1
    found = record.findings(kept, failed)
    made = summary("chaos", found, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), settings=vars(options))
    made["command"] = " ".join(["python -m tests.faults.chaos", *sys.argv[1:]])
    print(encode(made))
    if options.keep:
        (RESULTS / "chaos.json").write_text(encode(made))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
