"""What fsspec's drivers raise, in our words; and URLs without their secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deltafmt.errors import DeltafmtError, NotFoundError, StoreError
from deltafmt.store.base import AlreadyExists

_PASSING = (ConnectionError, TimeoutError, BlockingIOError, InterruptedError)
_PASSING_NAMES = frozenset(
    {
        "ConnectionError",
        "ClientConnectionError",
        "ClientPayloadError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
        "ServiceRequestError",
        "ServiceResponseError",
        "ResponseParserError",
        "Timeout",
    }
)
"""Classes of the client libraries that stand for a lost connection, without having to import them."""
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
PASSING_CODES = frozenset({"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"})
_EXISTS_NAMES = frozenset({"FileExistsError", "ResourceExistsError"})
_PRECONDITION_FAILED, _CONFLICT = 412, 409
_LINKS = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")
"""Before a link of a chain; elsewhere it belongs to a password, or to links without secrets."""
_QUERY = re.compile(r"\?|#(?=.*=)")
_NO_BUCKET = "NoSuchBucket"


def translated(error: Exception, key: str) -> DeltafmtError:
    """A driver's error as one of ours.

    Its text may hold URLs with credentials and stays out of the message. A failed condition is `AlreadyExists`;
    a conflict with a request that is still under way (409) says nothing about what will be there in the
    end, and is `store-busy`.
    """
    chain = list(causes(error))
    codes = {_code(cause) for cause in chain}
    if _NO_BUCKET in codes:
        return StoreError("the bucket does not exist; create it first", kind="store-failed", where=key)
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError("no such object", kind="object-missing", where=key)
    found = statuses(error)
    if _PRECONDITION_FAILED in found or any(_named(cause, _EXISTS_NAMES) for cause in chain):
        return AlreadyExists("object exists already", kind="already-exists", where=key)
    what = type(error).__name__
    if _CONFLICT in found:
        return StoreError(f"storage is busy with another request ({what})", kind="store-busy", where=key)
    if isinstance(error, PermissionError):
        return StoreError(
            "storage refused access; check credentials and permissions", kind="store-failed", where=key
        )
    passing = (
        found & _PASSING_STATUS
        or codes & PASSING_CODES
        or any(isinstance(cause, _PASSING) or _named(cause, _PASSING_NAMES) for cause in chain)
    )
    kind = "store-unreachable" if passing else "store-failed"
    return StoreError(f"storage failed ({what})", kind=kind, where=key)


def statuses(error: BaseException) -> set[int | None]:
    """The HTTP statuses in an error and its causes: some drivers hide them below an error of their own."""
    return {_status(cause) for cause in causes(error)}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it comes from, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _named(error: BaseException, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of botocore, aiohttp, gcsfs, google-auth or azure-core."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "status_code", None)
        status = status or getattr(error, "code", None)
    if isinstance(status, str) and status.isdecimal():
        return int(status)
    return status if isinstance(status, int) else None


def _code(error: BaseException) -> str | None:
    """The S3 error code in an error of botocore."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code if isinstance(code, str) else None


def public_url(url: str) -> str:
    """The URL without user names, passwords, queries and what a fragment assigns, in every link of a chain.

    What cannot be told from a password is left out, too.
    """
    return "::".join(_public_link(link) for link in _LINKS.split(url))


def _public_link(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2]
    place, query = _QUERY.split(rest, 1)[0], _QUERY.search(rest)
    if query is not None and "@" in rest[query.start() :]:
        # It ends a query, or a password that has a question mark in it.
        return f"{head}{separator}..."
    authority, slash, path = place.partition("/")
    if ":" in authority and "@" in place:
        # A password may hold slashes.
        return f"{head}{separator}{place.rpartition('@')[2]}"
    return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path}"
