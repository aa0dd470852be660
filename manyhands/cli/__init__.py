"""The command line: few verbs, one file each."""

import argparse
import os
import sys
from collections.abc import Sequence

from manyhands import __version__
from manyhands.cli import convert, doctor, launch, list, train
from manyhands.errors import ManyhandsError

DESCRIPTION = """\
Many hands make light work: one training script, any published way of distributing it.

Start here:
  manyhands train                                   a small network on real digits, 2 workers
  manyhands train --model resnet20 --data cifar10 --fetch
  manyhands launch --workers 4 script.py            your own script, see `manyhands launch --help`
  manyhands list strategies                         what --strategy can be, with the papers
  manyhands doctor                                  what this machine can do
"""


def build() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="manyhands", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"manyhands {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for verb in (train, launch, list, convert, doctor):
        verb.add_to(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every user error is one sentence and a non-zero exit code."""
    # `--model mymodule:build` means a module beside the user, as it would for `python script.py`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    parser = build()
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        return code
    except ManyhandsError as error:
        # As the interpreter does: what runs at exit sees that the run failed, and does not wait for other workers.
        sys.last_value = error
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        sys.last_value = error
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> "None":  # type: ignore[override]
        print(f"error: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)
