"""S3, and servers that speak its protocol, through s3fs."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self

from deltafmt.errors import NotFoundError, StoreError
from deltafmt.format.keys import LINEAGE
from deltafmt.store.base import Buffer, Entry, Sink, guarded
from deltafmt.store.fsspec import Create, FsspecStore
from deltafmt.store.quick import QuickReader
from deltafmt.store.translate import PASSING_CODES

PART_BYTES = 8 << 20
"""Size of an upload's first parts; an object that fits one is written by a single PUT."""
UPLOADS = 4
"""Parts of one upload that are under way at once."""
_PARTS_PER_SIZE = 1000
"""After so many parts they double in size, so that 10,000 of them hold the largest object there can be."""
_PAGE = 1000
"""Keys that are listed or deleted by one request."""
_BODY_BYTES = 1 << 20
_CONFIG = {
    "connect_timeout": 5,
    "read_timeout": 20,
    # Several threads may read at once, and a writer may upload meanwhile.
    "max_pool_connections": 4 * (FsspecStore.readers + UPLOADS),
    # All tries are made by the store, within one budget. Otherwise botocore's are multiplied by s3fs's.
    "retries": {"total_max_attempts": 1, "mode": "standard"},
}
_CONTINUED = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
}
"""How to ask for the next page of a listing: arguments, and where the page before tells them."""
_CHECKSUMS = frozenset(
    {"ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"}
)


def conditional_put(fs: Any, path: str, data: bytes) -> None:
    """One PUT that the server carries out only if nothing is there."""
    bucket, name, _ = fs.split_path(path)
    fs.call_s3("put_object", Bucket=bucket, Key=name, Body=_body(data), IfNoneMatch="*")


class S3Store(FsspecStore):
    """A bucket, or a part of one.

    Objects are read by ranged requests in parallel, larger ones written in parts behind the writer's back,
    and created by a single PUT with a condition. Requests time out, and are repeated within a budget.
    `storage_options` are s3fs's: `key`, `secret`, `endpoint_url`, `client_kwargs`, `config_kwargs`, ...; with
    `obstore` true objects are read by that (all else stays with s3fs).
    """

    _quick: QuickReader | None = None

    protocols: ClassVar[frozenset[str]] = frozenset({"s3", "s3a"})
    creates: ClassVar[Mapping[str, Create]] = dict.fromkeys(protocols, conditional_put)

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> Self:
        quick = options.get("obstore", False)
        store = super().open(url, {name: value for name, value in options.items() if name != "obstore"})
        if quick:
            store._quick = QuickReader(store.fs)
        return store

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        # A client takes a third of a second to make; the stores of one thread share it.
        return {**options, "config_kwargs": {**_CONFIG, **(options.get("config_kwargs") or {})}}

    @classmethod
    def prepared(cls, fs: Any) -> Any:
        fs.retries = 1
        return fs

    def size(self, key: str) -> int:
        head = self.request(key, "head_object")
        return int(head["ContentLength"])

    def read_all(self, key: str) -> bytes:
        # Without a range s3fs asks for the size first.
        return bytes(self._read(key, lambda: self._once(key, lambda path: self._cat(path, start=0))))

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        return self._read(key, partial(super().read_range, key, start, stop), start, stop)

    def _read(
        self, key: str, by_driver: Callable[[], Buffer], start: int = 0, stop: int | None = None
    ) -> Buffer:
        """Bytes of an object by obstore, where it is asked for and can, else by the driver."""
        quick = self._quick
        if quick is None:
            return by_driver()
        found: Buffer | None = self._once(key, lambda path: quick.read(path, start, stop))
        if found is None:
            found = by_driver()
            # Where nothing is to be had, for the range is outside of the object, obstore complains rightly.
            if found:
                quick.missed()
        return found

    def put(self, key: str, data: Buffer) -> None:
        if memoryview(data).nbytes <= PART_BYTES:
            self.request(key, "put_object", body=bytes(data))
            return
        sink = self.open_sink(key)
        try:
            sink.write(data)
            sink.close()
        except BaseException:
            sink.abort()
            raise

    def open_sink(self, key: str) -> Sink:
        self._path(key)
        return _UploadSink(self, key)

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        bucket, name = self._place(folder)
        prefix = f"{name}/"
        options = {} if after is None else {"StartAfter": self._place(after)[1]}
        for page in self._pages(
            "list_objects_v2", folder, Bucket=bucket, Prefix=prefix, MaxKeys=_PAGE, Delimiter="/", **options
        ):
            for item in page.get("Contents", ()):
                if name := item["Key"].removeprefix(prefix):
                    yield f"{folder}/{name}"

    def entries(self, folder: str) -> Iterator[Entry]:
        bucket, name = self._place(folder)
        prefix = f"{name}/"
        for page in self._pages("list_objects_v2", folder, Bucket=bucket, Prefix=prefix, MaxKeys=_PAGE):
            for item in page.get("Contents", ()):
                if name := item["Key"].removeprefix(prefix):
                    yield Entry(f"{folder}/{name}", item["Size"], item["LastModified"].timestamp())

    def remnants(self) -> Iterator[Entry]:
        """Uploads that were neither completed nor given up: the server keeps their parts."""
        bucket, name = self._place(LINEAGE)
        prefix = name.removesuffix(LINEAGE)
        for page in self._pages("list_multipart_uploads", "uploads", Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                key = upload["Key"].removeprefix(prefix)
                yield Entry(f"{key}?{upload['UploadId']}", 0, upload["Initiated"].timestamp())

    def discard(self, remnants: Iterable[Entry]) -> None:
        for remnant in remnants:
            key, _, upload = remnant.key.rpartition("?")
            with suppress(NotFoundError):
                self.request(key, "abort_multipart_upload", UploadId=upload)

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while some := tuple(islice(remaining, _PAGE)):
            self._again(partial(self._delete_once, some))

    def request(self, key: str, method: str, body: bytes | None = None, **arguments: Any) -> Any:
        """Carry out a request on an object that may be repeated; returns the reply."""
        return self._again(lambda: self.request_once(key, method, body, **arguments))

    def request_once(self, key: str, method: str, body: bytes | None = None, **arguments: Any) -> Any:
        """The same, at a single try."""
        bucket, name = self._place(key)
        content = {} if body is None else {"Body": _body(body)}
        return self._call(key, method, Bucket=bucket, Key=name, **content, **arguments)

    def _call(self, where: str, method: str, **arguments: Any) -> Any:
        return self._once(where, lambda _: self.fs.call_s3(method, **arguments))

    def _place(self, key: str) -> tuple[str, str]:
        """Bucket and name in the bucket."""
        bucket, name, _ = self.fs.split_path(self._path(key))
        return bucket, name

    def _pages(self, method: str, folder: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Pages of a listing, each fetched when it is wanted."""
        more: dict[str, Any] = {}
        while True:
            page = self._again(partial(self._call, folder, method, **arguments, **more))
            yield page
            if not page.get("IsTruncated"):
                return
            more = {asked: page[told] for asked, told in _CONTINUED[method].items()}

    def _delete_once(self, keys: tuple[str, ...]) -> None:
        if len(keys) == 1:
            self.request_once(keys[0], "delete_object")
            return
        places = {self._place(key)[1]: key for key in keys}
        bucket = self._place(keys[0])[0]
        wanted = {"Objects": [{"Key": name} for name in places], "Quiet": True}
        reply = self._call(keys[0], "delete_objects", Bucket=bucket, Delete=wanted)
        failed = [item for item in reply.get("Errors", ()) if item.get("Code") != "NoSuchKey"]
        # One that would fail again comes before those that may succeed at another try.
        for item in sorted(failed, key=lambda item: item.get("Code") in PASSING_CODES):
            code = item.get("Code")
            raise StoreError(
                f"storage did not delete an object ({code})",
                kind="store-unreachable" if code in PASSING_CODES else "store-failed",
                where=places.get(item.get("Key", ""), keys[0]),
            )


class _UploadSink:
    """An object written in parts, a bounded number of them in memory; nothing is seen of it until it is closed."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, key
        self._buffer = io.BytesIO()
        self._upload: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._size = 0
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            room = self._part_bytes - self._buffer.tell()
            self._buffer.write(view[:room])
            view = view[room:]
            if self._buffer.tell() == self._part_bytes:
                self._send()

    def close(self) -> None:
        if self._upload is None:
            self._store.request(self._key, "put_object", self._buffer.getvalue())
            return
        if self._buffer.tell():
            self._send()
        parts = {"Parts": [part.result() for part in self._parts]}
        try:
            self._store.request(
                self._key, "complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts
            )
        except NotFoundError:
            # The reply to an earlier try was lost, and the upload is complete and gone.
            if self._store.size(self._key) != self._size:
                raise
        self._stop()

    def abort(self) -> None:
        self._stop()
        if self._upload is not None:
            guarded(self._key, self._abandon)
        guarded(self._key, lambda: self._store.delete([self._key]))

    @property
    def _part_bytes(self) -> int:
        return PART_BYTES << (len(self._parts) // _PARTS_PER_SIZE)

    def _send(self) -> None:
        """Hand the buffer over to be uploaded, after the oldest part if enough are under way."""
        if self._upload is None:
            self._upload = self._store.request(self._key, "create_multipart_upload")["UploadId"]
            self._pool = ThreadPoolExecutor(UPLOADS, "deltafmt-upload")
        assert self._pool is not None
        if len(self._under_way) >= UPLOADS:
            self._under_way.popleft().result()
        part, self._buffer = self._buffer.getvalue(), io.BytesIO()
        self._size += len(part)
        future = self._pool.submit(self._put_part, len(self._parts) + 1, part)
        self._parts.append(future)
        self._under_way.append(future)

    def _put_part(self, number: int, part: bytes) -> dict[str, Any]:
        reply = self._store.request(self._key, "upload_part", part, UploadId=self._upload, PartNumber=number)
        # A checksum that the client sent along with the part belongs to its description.
        sums = {name: value for name, value in reply.items() if name in _CHECKSUMS}
        return {"PartNumber": number, "ETag": reply["ETag"], **sums}

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._buffer = io.BytesIO()

    def _abandon(self) -> None:
        try:
            self._store.request(self._key, "abort_multipart_upload", UploadId=self._upload)
        except NotFoundError:
            return


def _body(data: bytes) -> bytes | io.BytesIO:
    """What the HTTP client sends in pieces if it is large; bytes would go to the socket in one step."""
    return data if len(data) <= _BODY_BYTES else io.BytesIO(data)
