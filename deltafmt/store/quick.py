"""Reads of S3 by obstore: native code asks and receives where an event loop in Python would be the limit."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import fsspec

from deltafmt.errors import UnsupportedError
from deltafmt.store.base import Buffer

_LOG = logging.getLogger("deltafmt")
_CREDENTIALS_MINUTES = 5
"""The session renews credentials that expire by itself: it is asked anew so often."""
_GIVE_UP = 3
"""Failures in a row of reads that the driver can do, behind which it does all of them."""


class QuickReader:
    """Reads what an s3fs file system reads: at its endpoint, in its region, with its credentials.

    Raises `UnsupportedError` (`store-unsupported`) where obstore is not installed.
    """

    def __init__(self, fs: Any) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise UnsupportedError(
                "reads by obstore need it: pip install 'deltafmt[obstore]'", kind="store-unsupported"
            ) from error
        self._fs, self._get = fs, obstore
        self._make, self._buckets = S3Store, dict[str, Any]()
        # Its threads do not survive a fork.
        self._process = os.getpid()
        self._failed = 0
        self._error: Exception | None = None

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Buffer | None:
        """Bytes of an object, all of them without `stop`; None where the driver is to read.

        Raises `FileNotFoundError` for an object that is not there. Whatever else goes wrong the driver meets,
        too, and it is known what its errors mean.
        """
        if self._failed >= _GIVE_UP or self._process != os.getpid():
            return None
        bucket, name, _ = self._fs.split_path(path)
        try:
            store = self._bucket(bucket)
            data = (
                self._get.get(store, name).bytes()
                if stop is None
                else self._get.get_range(store, name, start=start, end=stop)
            )
        except Exception as error:  # what its errors derive from is an affair of its own
            if "NoSuchKey" in str(error):
                raise FileNotFoundError(path) from error
            self._error = error
            return None
        self._failed, self._error = 0, None
        return memoryview(data)

    def missed(self) -> None:
        """The driver has read what this could not."""
        if self._error is not None and self._failed < _GIVE_UP:
            self._failed += 1
            if self._failed == _GIVE_UP:
                _LOG.warning("obstore cannot read here, s3fs can and does: %s", self._error)

    def _bucket(self, bucket: str) -> Any:
        if bucket not in self._buckets:
            self._fs.connect()
            meta = self._fs.s3.meta
            access: dict[str, Any] = (
                {"skip_signature": True} if self._fs.anon else {"credential_provider": self._credentials}
            )
            self._buckets[bucket] = self._make(
                bucket,
                endpoint=meta.endpoint_url,
                region=meta.region_name or "us-east-1",
                virtual_hosted_style_request=False,
                client_options={
                    "timeout": "20s",
                    "connect_timeout": "5s",
                    "allow_http": meta.endpoint_url.startswith("http://"),
                },
                # All tries are made by the store, within one budget.
                retry_config={"max_retries": 0},
                **access,
            )
        return self._buckets[bucket]

    def _credentials(self) -> dict[str, Any]:
        fs = self._fs
        key, secret, token = fs.key, fs.secret, fs.token
        if not key:
            found = fsspec.asyn.sync(fs.loop, fs.session.get_credentials)
            frozen = fsspec.asyn.sync(fs.loop, found.get_frozen_credentials)
            key, secret, token = frozen.access_key, frozen.secret_key, frozen.token
        expires = datetime.now(UTC) + timedelta(minutes=_CREDENTIALS_MINUTES)
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": token,
            "expires_at": expires,
        }
