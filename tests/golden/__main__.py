"""`make golden`: run every case and write down what it computes. With `--check`, only compare and say what differs.

To see what another processor would compute, run `--check` with `ATEN_CPU_CAPABILITY=avx2` in the environment, with
`avx512`, with `MKL_CBWR=COMPATIBLE` and with `MKL_ENABLE_INSTRUCTIONS=AVX2`: no curve differs. With
`ATEN_CPU_CAPABILITY=default`, a processor from before 2013, Adam's curves and a few others do: that processor cannot
fuse a multiplication with an addition, and rounds once more.
"""

import contextlib
import io
import sys

from tests.golden import store
from tests.golden.cases import cases, run


def main(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = {case: run(case) for case in cases()}
    known = store.read()
    changed = [case for case, curve in found.items() if known.get(store.key(case)) != curve]
    for case in changed:
        print(f"{'differs' if store.key(case) in known else 'new'}: {case.kind}: {case}")
    gone = known.keys() - {store.key(case) for case in found}
    for kind, name in sorted(gone):
        print(f"gone: {kind}: {name}")
    print(f"{len(found)} curves, {len(changed)} of them changed, {len(gone)} gone")
    if "--check" in arguments:
        return 1 if changed or gone else 0
    store.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
