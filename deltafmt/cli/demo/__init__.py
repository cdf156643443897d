"""`deltafmt demo`: train a real small transformer here, publish its versions, follow them in other processes."""

from __future__ import annotations

import argparse

from deltafmt.cli.arguments import Verbs, add_verb, storage_options
from deltafmt.cli.failures import DAMAGE, FINE, UsageError
from deltafmt.cli.output import Output

_EXAMPLES = """\
  deltafmt demo                                  in a temporary directory that is removed again
  deltafmt demo ./run --versions 20 --seed 1     keeps the lineage: look at it with log, show, verify, export
  deltafmt demo s3://bucket/demo --json

What runs: a trainer (AdamW at a learning rate usual in reinforcement learning), two tensor-parallel receivers with
fused and sharded tensors, and one receiver that joins half way. It ends with the proof that all hold the same bits."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "demo", "train, publish and follow, all on this machine", _EXAMPLES)
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="where to publish (default: a temporary directory)"
    )
    parser.add_argument(
        "--versions", type=int, default=12, metavar="N", help="versions to publish (default: 12)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of weights and data (default: 0)"
    )
    parser.add_argument(
        "--size",
        choices=("small", "tiny"),
        default="small",
        help="small: 12.6 M parameters; tiny: for a quick look",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    if options.versions < 2:
        raise UsageError("the demo needs at least two versions", "add --versions 2 or more")
    if options.url is not None and options.url.startswith("memory:"):
        raise UsageError(
            "the receivers are other processes and cannot see this one's memory", "name a directory"
        )
    from deltafmt.cli.demo.play import Demo
    from deltafmt.cli.demo.screen import open_screen

    demo = Demo(
        url=options.url,
        versions=options.versions,
        seed=options.seed,
        size=options.size,
        storage_options=storage_options(options),
    )
    with open_screen(out) as screen:
        result = demo.play(screen)
    if out.json:
        out.document(result)
    return FINE if result["identical"] else DAMAGE
