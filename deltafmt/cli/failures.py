"""Errors as exit codes and as advice: what happened, and what to do next."""

from __future__ import annotations

import sys

from deltafmt.cli.output import Output
from deltafmt.errors import (
    BaseMismatchError,
    CommitConflictError,
    CommitUnknownError,
    DeltafmtError,
    FormatError,
    IncompleteError,
    LayoutError,
    NotFoundError,
    SchemaError,
    StoreError,
    UnsupportedError,
    VersionGoneError,
)

FINE, DAMAGE, USAGE, STORAGE = 0, 1, 2, 3
INTERRUPTED, PIPE_CLOSED = 130, 141

_ADVICE: tuple[tuple[type[DeltafmtError], int, str], ...] = (
    (FormatError, DAMAGE, "run `deltafmt verify URL` to see all damage and which versions it takes down"),
    (UnsupportedError, USAGE, "a newer deltafmt may know it; `deltafmt --version` tells this one's"),
    (VersionGoneError, USAGE, "retention removed it; `deltafmt log URL` lists what is left"),
    (
        NotFoundError,
        USAGE,
        "`deltafmt log URL` lists what is there; `deltafmt create URL --from DIR` begins a lineage",
    ),
    (BaseMismatchError, USAGE, "the tensors given are not the version they were said to be"),
    (CommitConflictError, USAGE, "another writer was first; run the command again to publish on top of it"),
    (CommitUnknownError, STORAGE, "run the command again when the storage is back: it settles what happened"),
    (IncompleteError, USAGE, "wait until every rank has delivered, then run the command again"),
    (
        SchemaError,
        USAGE,
        "names, shapes or dtypes do not fit; `deltafmt publish --anchor` starts from all bytes again",
    ),
    (LayoutError, USAGE, "compare the layout with `deltafmt show URL --tensors`"),
    (StoreError, STORAGE, "check the URL, the credentials in the environment, and --storage-option"),
)
"""First match counts: (class, exit code, next step)."""


_ADVICE_BY_KIND = {
    "name-unknown": "`deltafmt show URL --tensors` lists the names",
    "lineage-exists": "publish to it: deltafmt publish URL DIR",
    "signature-missing": "it was published without --sign-with; drop --trust to take it all the same",
    "signature-untrusted": "give the public half of the key that it names with --trust",
    "extra-missing": "install it into the environment that runs this command",
    "key-missing": "sign what is added: --sign-with FILE",
    "signature-wrong": "somebody changed it after it was signed, or it was signed by somebody else",
    "version-missing": "`deltafmt log URL` lists the versions that are there",
    "lineage-missing": "check the URL; `deltafmt create URL --from DIR` begins a lineage there",
    "object-missing": "`deltafmt verify URL` tells which objects are missing, and what needs them",
    "store-unsupported": "give a path, or a URL that an installed fsspec driver opens; for S3: pip install 'deltafmt[s3]'",
    "chain-broken": "`deltafmt verify URL` says what is missing; an anchor of a later version mends it",
}
"""Advice where the reason says more than the class."""


class UsageError(Exception):
    """A request that the command refuses: `message`, and what to do instead."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def classify(error: BaseException) -> tuple[int, str] | None:
    """(exit code, next step) of an expected error; None for a fault of the command itself."""
    for kind, code, advice in _ADVICE:
        if isinstance(error, kind):
            assert isinstance(error, DeltafmtError)
            return code, _ADVICE_BY_KIND.get(error.kind, advice)
    if isinstance(error, UsageError):
        return USAGE, error.advice
    if isinstance(error, FileNotFoundError | FileExistsError | IsADirectoryError | NotADirectoryError):
        return USAGE, "check the path"
    if isinstance(error, OSError):
        return STORAGE, "check the URL, the network, permissions and free space"
    if isinstance(error, ImportError):
        return (
            USAGE,
            "install what is missing; deltafmt's extras are s3, gcs, azure, obstore, sign, transformers, demo",
        )
    return None


def describe(error: BaseException) -> dict[str, object]:
    """An error as plain data."""
    facts: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, DeltafmtError):
        for name in ("kind", "where", "expected", "found"):
            value = getattr(error, name)
            facts[name] = value if value is None or isinstance(value, int) else str(value)
    return facts


def report(error: Exception, out: Output) -> int:
    """Tell about an error on stderr (with --json also on stdout) and return the exit code; re-raise faults."""
    known = classify(error)
    if known is None:
        raise error
    code, advice = known
    if out.json:
        out.document({**describe(error), "next": advice, "exit_code": code})
    kind = f" [{error.kind}]" if isinstance(error, DeltafmtError) else ""
    print(f"deltafmt: {error}{kind}\n  next: {advice}", file=sys.stderr)
    return code
