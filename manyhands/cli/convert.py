"""`manyhands convert`: any data set as one LMDB file, which workers read faster than many small files."""

import argparse
import sys
from pathlib import Path
from typing import Any

from manyhands.cli.bars import samples
from manyhands.errors import UsageError

EXAMPLES = """\
examples:
  manyhands convert --data images:photos photos.lmdb              folders of pictures, decoded once
  manyhands convert --data images:photos --size 64 small.lmdb     and scaled to 64×64
  manyhands train --data lmdb:photos.lmdb --model resnet20        how it is used
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "convert",
        help="write data into one LMDB file that loads fast",
        description="Write a data set, its train and its test part, into one LMDB file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", metavar="D", required=True, help="a name of `list data`, or package.module:callable"
    )
    parser.add_argument(
        "--size", type=int, metavar="N", help="scale pictures to N × N (default: as they are)"
    )
    parser.add_argument("out", type=Path, metavar="OUT.lmdb", help="the file to write; it must not exist yet")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    out: Path = options.out
    if out.exists():
        raise UsageError(f"{out} exists already; remove it, or choose another name")
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}; make it, or choose another")
    from manyhands import data

    found = data.load(options.data, size=options.size)
    if found.note:
        print(found.note, file=sys.stderr)
    try:
        with samples() as progress:
            data.to_lmdb(found, out, progress)
    except OSError as error:
        raise UsageError(f"cannot write {out} ({error.strerror}); choose another place") from None
    shape = "×".join(str(length) for length in found.shape)
    print(
        f"{out}: {len(found.train):,} samples to train on and {len(found.test):,} to test with, {shape}, "
        f"{found.classes} classes, {out.stat().st_size / 1e6:.1f} MB\n"
        f"use it with: manyhands train --data lmdb:{out}"
    )
    return 0
