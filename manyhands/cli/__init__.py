"""The command line: few verbs, one file each."""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from manyhands import __version__
from manyhands.cli import convert, dash, doctor, export, launch, list, planning, probe, serve, show, train
from manyhands.cli.script import is_script
from manyhands.errors import ManyhandsError, did_you_mean
from manyhands.launching.words import say

DESCRIPTION = """\
Many hands make light work: one training script, any published way of distributing it.

Start here:
  manyhands train                                   a small network on real digits, 2 workers
  manyhands train --model resnet20 --data cifar10 --fetch     published data, downloaded once
  manyhands launch --workers 4 script.py            your own script, see `manyhands launch --help`
  manyhands plan --model vgg16 --data cifar10       which way is fastest here, and why
  manyhands serve runs/mine                         answers from what is trained, also while it is trained
  manyhands list strategies                         what --strategy can be, with the papers
  manyhands show resnet20                           its layers, shapes, parameters and costs
  manyhands doctor                                  what this machine can do; with a run, what is wrong with it
  manyhands dash                                    all of it on a page in your browser, live
"""


def build() -> "_Parser":
    parser = _Parser(
        prog="manyhands", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"manyhands {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", parser_class=_Parser)
    for verb in (train, launch, planning, probe, export, serve, list, show, convert, doctor, dash):
        verb.add_to(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every user error is one sentence and a non-zero exit code."""
    # `--model mymodule:build` means a module beside the user, as it would for `python script.py`.
    try:
        here = os.getcwd()
    except FileNotFoundError:
        say("error: the directory in which this command was given is no longer there; give it in another one")
        return 2
    if here not in sys.path:
        sys.path.append(here)  # last: a `torch.py` in the folder of a run takes the place of no library
    parser = build()
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if wrong := _script_without_launch(words):
        say(f"error: {wrong}")
        return 2
    options, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(options.verb, unknown)
    if options.verb is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        return code
    except ManyhandsError as error:
        # As the interpreter does: what runs at exit sees that the run failed, and does not wait for other workers.
        sys.last_value = error
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        sys.last_value = error
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _script_without_launch(words: Sequence[str]) -> str:
    """What to say to a person who gives a script to another command, or to none."""
    if words and is_script(words[0]):
        return f"{words[0]} is a script; use manyhands launch {' '.join(words)}"
    for before, word in itertools.pairwise(words):
        if words[0] == "train" and is_script(word) and not before.startswith("-"):
            return (
                f"train takes the names of a model and data, or a spec file in TOML, and {word} is a script; "
                f"use manyhands launch {' '.join(words[1:])}"
            )
    return ""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that say what was probably meant."""

    def error(self, message: str) -> "None":  # type: ignore[override]
        message = _NO_NUMBER.sub(r"\1 \2: a whole number is expected", message)
        see = f"{' S' if message.endswith('?') else '; s'}ee `{self.prog} --help`"
        say(f"error: {message}{see}")
        raise SystemExit(2)

    def refuse(self, verb: str | None, unknown: Sequence[str]) -> None:
        """Options and words that a command does not have."""
        if verb == "launch" and "--resume" in unknown:
            say(_NO_RESUME)
            raise SystemExit(2)
        parser, option = self._of(verb), unknown[0].partition("=")[0]
        known = parser._option_string_actions
        elsewhere = {name: ours for name, ours in _OPTIONS_ELSEWHERE.items() if ours in known}
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(option, known, elsewhere)}")

    def _of(self, verb: str | None) -> "_Parser":
        subparsers = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        found: _Parser = subparsers[0].choices[verb] if verb else self
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = (
                action.option_strings[0] if action.option_strings else _CALLED.get(action.dest, action.dest)
            )
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known, {})
            self.error(f"unknown {what} {value!r}; known: {', '.join(known)}{hint}")


_CALLED = {"verb": "command", "what": "kind"}

_NO_NUMBER = re.compile(r"argument (--[\w-]+): invalid int value: ('.*')")

_NO_RESUME = (
    "error: launch has no --resume, since a script goes on by itself: start the same command again with the same "
    "--out, and session.resume() in the script takes the newest checkpoint"
)

_OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("-n", "-np", "--np", "--nproc-per-node", "--nproc", "--num-processes"), "--workers"),
    **dict.fromkeys(("--gpus", "--num-gpus", "--num-workers", "--world-size"), "--workers"),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--nodes", "--num-machines"), "--hosts"),
}
