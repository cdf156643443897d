"""Pieces of the command line that several verbs share."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from deltafmt.cli.failures import UsageError

if TYPE_CHECKING:
    from deltafmt.lineage import Lineage

Verbs = Any
"""What `ArgumentParser.add_subparsers` returns; argparse does not name its class."""

LATEST = "latest"


def add_verb(
    verbs: Verbs, common: argparse.ArgumentParser, name: str, help_text: str, examples: str
) -> argparse.ArgumentParser:
    """Declare a verb with a one-line help and a page that teaches by examples."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"examples:\n{examples}",
        parents=[common],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the lineage's root: a path or any fsspec URL")


def version_argument(text: str) -> int | str:
    """`12`, `v12` or `latest`.

    >>> version_argument("v12"), version_argument("latest")
    (12, 'latest')
    """
    if text == LATEST:
        return LATEST
    digits = text.removeprefix("v")
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no version: give a number such as 12, or `latest`")
    return int(digits)


def add_meta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="the trainer's step, kept as a label")
    parser.add_argument(
        "--meta",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a free label of the version; VALUE may be JSON (may be given again)",
    )


def add_signing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sign-with",
        metavar="FILE",
        help="sign what is published: an Ed25519 private key in PEM, or a shared secret in hex digits",
    )


def key_of(path: str) -> Any:
    """The key in a file."""
    from deltafmt.format.signing import load_key

    try:
        return load_key(path)
    except ValueError as error:
        raise UsageError(
            str(error), "make one: openssl genpkey -algorithm ed25519 -out key.pem, or openssl rand -hex 32"
        ) from error


def trusted_keys(options: argparse.Namespace) -> list[Any]:
    """The keys with which versions must be signed; a private one stands for its public half."""
    keys = [key_of(path) for path in options.trust]
    return [getattr(key, "verifier", key) for key in keys]


def writer_options(options: argparse.Namespace, **more: Any) -> Any:
    """What the command line says of signing, as a writer's options."""
    from deltafmt.write.options import WriterOptions

    if options.trust and options.sign_with is None:
        raise UsageError(
            "what is published would not be signed, and readers who demand it stop there",
            "sign it: --sign-with FILE",
        )
    sign_with = None if options.sign_with is None else key_of(options.sign_with)
    return WriterOptions(sign_with=sign_with, trust=trusted_keys(options), **more)


def pairs(texts: list[str], option: str) -> dict[str, Any]:
    """KEY=VALUE options as a dictionary; values that are JSON are read as JSON.

    >>> pairs(["anon=true", "endpoint_url=http://localhost:1"], "--storage-option")
    {'anon': True, 'endpoint_url': 'http://localhost:1'}
    """
    result = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise UsageError(f"{option} {text!r} is not KEY=VALUE", f"write {option} {key or 'KEY'}=VALUE")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    return pairs(options.storage_option, "--storage-option") or None


def open_lineage(options: argparse.Namespace, *, damaged: bool = False) -> Lineage:
    """The lineage that the command line names; `damaged` takes one without a descriptor that can be read."""
    from deltafmt import lineage

    path = getattr(options, "sign_with", None)
    return (lineage.unopened if damaged else lineage.open)(
        options.url,
        storage_options=storage_options(options),
        trust=trusted_keys(options),
        sign_with=None if path is None else key_of(path),
    )


def resolve_version(lineage: Lineage, version: int | str) -> int:
    """The number that a version argument stands for."""
    if version != LATEST:
        return int(version)
    newest = lineage.latest()
    if newest is None:
        raise UsageError("the lineage has no version yet", "publish one: deltafmt publish URL DIR")
    return newest
