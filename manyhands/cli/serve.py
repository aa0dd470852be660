"""`manyhands serve`: answers from what was trained, also while it is still training."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from manyhands.errors import UsageError
from manyhands.launching.words import say

EXAMPLES = """\
examples:
  manyhands serve runs/mine                          the newest checkpoint, and each later one as soon as it is saved
  manyhands serve digits=runs/a birds=models/birds   several models: of runs, of folders that `export` writes to
  manyhands serve serve.toml                         labels, shares of traffic, batching, limits: see below
  manyhands serve runs/mine --host 0.0.0.0 --tokens tokens.toml --tls cert.pem key.pem

then, at http://127.0.0.1:8000:
  GET  /                                             a page to try it
  POST /predict                                      a picture: curl --data-binary @7.png http://127.0.0.1:8000/predict
  POST /v2/models/NAME/infer                         Open Inference Protocol, JSON or binary: clients of Triton, KServe
  POST /v1/models/NAME:predict                       TensorFlow Serving's REST form
  GET  /metrics                                      for Prometheus

serve.toml:
  processes = 2
  [models.digits]
  source = "runs/mine"                               # relative to this file
  versions = "latest:2"                              # or "all", or [3, 4]
  labels = { stable = "previous", canary = "newest" }
  traffic = { stable = 0.9, canary = 0.1 }
  [batching]
  most_samples = 64

tokens.toml, for its owner alone (chmod 600):
  [[tokens]]
  token = "at least sixteen characters"
  role = "infer"                                     # or "admin"
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "serve",
        help="answer from trained models over HTTP, by version, also while they train",
        description="Serve runs and exported models over HTTP. A version that fails to load, or is much worse than\n"
        "the one before it, is reported and not served; the old one goes on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources", nargs="+", metavar="[NAME=]SOURCE", help="a run, a folder of versions, or a TOML"
    )
    parser.add_argument("--host", help="where to listen (default 127.0.0.1; another one needs --tokens)")
    parser.add_argument("--port", type=int, metavar="N", help="default 8000; 0 is any free one")
    parser.add_argument("--processes", type=int, metavar="N", help="in which models compute (default 1)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of each of them (default: all cores but one, divided)"
    )
    parser.add_argument(
        "--allow",
        action="append",
        metavar="M",
        help="package.module:callable that a version may name as its model or data",
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="who may ask what; needed unless --host is 127.0.0.1"
    )
    parser.add_argument(
        "--tls", nargs=2, metavar=("CERT", "KEY"), help="encrypt, with a certificate and its key (PEM)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        import httptools  # noqa: F401  # an extra: training does without it
    except ImportError:
        raise UsageError("serving needs httptools; install it with: pip install 'manyhands[serve]'") from None
    from manyhands.serving.http_server import serve
    from manyhands.serving.serve_settings import ServeSettings, named_sources, read_settings

    words: list[str] = options.sources
    files = [word for word in words if word.endswith(".toml")]
    if files and len(words) > 1:
        raise UsageError(f"{files[0]} says all that is served; leave the other names out")
    settings = read_settings(Path(files[0])) if files else ServeSettings(models=named_sources(words))
    given = {
        name: value
        for name in ("host", "port", "processes", "threads", "tokens")
        if (value := getattr(options, name)) is not None
    }
    if options.tls is not None:
        given["certificate"], given["key"] = options.tls
    allow = (*settings.allow, *(options.allow or ()))
    return asyncio.run(serve(msgspec.structs.replace(settings, **given, allow=allow), say))
