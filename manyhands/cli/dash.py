"""`manyhands dash`: the page that shows runs as they go on, and on which runs are started."""

import argparse
import os
from pathlib import Path
from typing import Any

from manyhands.errors import UsageError

PASSWORD = "MANYHANDS_DASH_PASSWORD"
PORT = 8765

EXAMPLES = f"""\
examples:
  manyhands dash                                 the runs in runs/, on 127.0.0.1
  manyhands dash results --open                  those of another folder, in your browser
  ssh -L {PORT}:127.0.0.1:{PORT} server              a page on a server, seen here at the address that it prints there
  manyhands dash --host 0.0.0.0 --tls cert.pem key.pem    open to the network, encrypted

The address that is printed opens one browser, once. With {PASSWORD} set, a password signs in as well.
Runs that are started on the page end with it: they save first, and can be resumed.
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "dash",
        help="a page in the browser: watch runs live, start, stop and compare them",
        description="Show the runs of a folder on a page, live; choose, train, stop, resume and try models there.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR", help="where the runs are (default: runs)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="where to listen (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=None,
        metavar="N",
        help=f"default {PORT}, or any where it is taken; 0: any",
    )
    parser.add_argument("--open", action="store_true", help="open the browser")
    parser.add_argument(
        "--tls",
        nargs=2,
        type=Path,
        metavar=("CERT", "KEY"),
        help="encrypt, with a certificate and its key (PEM)",
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="let the page run models and data of your own, as package.module:callable",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    directory = options.directory
    if directory is None:
        directory = Path("runs")
        directory.mkdir(mode=0o700, exist_ok=True)
    try:
        from manyhands.dashboard.page_server import PageSettings, serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the page needs {error.name}, which is not installed; pip install 'manyhands[dash]'"
        ) from None
    return serve(
        PageSettings(
            directory=directory,
            host=options.host,
            port=options.port,
            tls=tuple(options.tls) if options.tls else None,
            allow_code=options.allow_code,
            password=os.environ.get(PASSWORD) or None,
            opens_browser=options.open,
        )
    )
