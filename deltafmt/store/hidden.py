"""Secrets in URLs and options, kept out of tracebacks: drivers put whole URLs into their errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from deltafmt.store.translate import causes

_SECRET_NAMES = re.compile(
    r"secret|passw|token|sas_|credential|account_key|connection_string|private", re.IGNORECASE
)
_USER = re.compile(r"://([^@]*)@")
_QUERY = re.compile(r"[?&#][^=&?#]*=([^&#]+)")
_SHORTEST = 4
"""Shorter texts stand in any message by chance."""


def secrets_of(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """What nobody should see of a root: passwords and query values of URLs, and the values of secret options."""
    found = [*_in_url(url), *_in_options(options)]
    return frozenset(text for each in found for text in (each, unquote(each)) if len(text) >= _SHORTEST)


def fit_to_show(error: Exception, secrets: frozenset[str]) -> Exception:
    """A driver's error as the cause of ours; one that tells a secret is replaced by its name alone."""
    texts = [f"{cause!r} {cause}" for cause in causes(error)]
    if any(secret in text for secret in secrets for text in texts):
        return RuntimeError(f"{type(error).__name__} (its text holds credentials, and is not shown)")
    return error


def _in_url(url: str) -> Iterator[str]:
    for user in _USER.findall(url):
        yield user.partition(":")[2] or user
    yield from _QUERY.findall(url)


def _in_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _in_options(value)
        elif isinstance(value, str):
            if _SECRET_NAMES.search(str(name)):
                yield value
            yield from _in_url(value)
