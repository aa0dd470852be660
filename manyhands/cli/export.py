"""`manyhands export`: one version of what a run has trained, as a folder to serve or to train on from."""

import argparse
from pathlib import Path
from typing import Any

from manyhands.errors import UsageError

EXAMPLES = """\
examples:
  manyhands export runs/mine models/digits             the newest checkpoint, as the next version there
  manyhands export runs/mine models/digits --step 120  the checkpoint of a step
  manyhands serve digits=models/digits                 serves every version that comes there
  manyhands train --weights models/digits              trains on from the newest version

a version is a folder without a line of code in it, and without a pickle:
  models/digits/1/weights.safetensors   what any tool for safetensors reads
  models/digits/1/description.json      model, plan, inputs, outputs, classes, what is done to pictures
  models/digits/1/sample.safetensors    held-out samples, on which later versions are compared with it
  models/digits/1/manifest.json         sizes and SHA-256 of the others
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "export",
        help="write one version of a trained model into a folder",
        description="Write one version of what a run has trained into DIR/VERSION, which is never changed again.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of a run of `train`")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the model's versions are")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of which step (default: the newest checkpoint)"
    )
    parser.add_argument(
        "--version", type=int, metavar="N", help="its number (default: one more than the highest)"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="M",
        help="package.module:callable of the run's model or data that may run",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.version is not None and not 1 <= options.version < 10**15:
        raise UsageError(f"--version {options.version}: versions count from 1")
    from manyhands.serving.exporting import export

    place, form = export(
        options.run_directory,
        options.directory,
        version=options.version,
        step=options.step,
        allowed=options.allow,
    )
    quality = f", accuracy {form.accuracy:.1%} on its recorded sample" if form.accuracy is not None else ""
    print(
        f"{place}: {form.model} of step {form.step}{quality}\n"
        f"takes {form.input.text()}, gives {form.output.text()}\n"
        f"serve it with: manyhands serve {options.directory.name}={options.directory}"
    )
    return 0
