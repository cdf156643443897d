"""An emulator of Google Cloud Storage on this machine, for tests: `pip install gcsfs gcp-storage-emulator`.

By itself it ignores the condition of an upload, so that it must be refused; `GcsServer(conditions=True)` makes
it look before it writes. It knows no end of an upload that is given up, which is added, too. It serves one request after another, between which nothing slips in.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# gcsfs would ask, by gRPC, which kind of bucket it is, and the emulator would let it wait a minute for that.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

import gcsfs

from deltafmt.testing.servers import Server, free_ports

_EMULATOR = """
import sys
from http import HTTPStatus
from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
port, bucket, conditions = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
def insert(request, response, storage, *args, **kwargs):
    if request.query.get("ifGenerationMatch") == ["0"]:
        try:
            storage.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
        except NotFound:
            pass
        else:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return response.json({"error": {"code": 412, "message": "conditionNotMet"}})
    return objects.insert(request, response, storage, *args, **kwargs)
def give_up(request, response, storage, *args, **kwargs):
    response.status = HTTPStatus.NO_CONTENT
for _, verbs in server.HANDLERS:
    if objects.upload_partial in verbs.values():
        verbs["DELETE"] = give_up
if conditions:
    server.HANDLERS = tuple(
        (path, {verb: insert if handler is objects.insert else handler for verb, handler in verbs.items()})
        for path, verbs in server.HANDLERS
    )
server.create_server("127.0.0.1", port, in_memory=True, default_bucket=bucket).run()
"""


class GcsServer(Server):
    """The emulator; any credentials will do, and SIGKILL forgets everything."""

    name = "gcs"

    def __init__(self, *, conditions: bool) -> None:
        super().__init__()
        self._conditions = conditions

    def command(self) -> list[str]:
        self.port = self.port or free_ports(1)[0]
        return [sys.executable, "-c", _EMULATOR, str(self.port), self.buckets[0], str(self._conditions)]

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"token": "anon", "project": "tests", "endpoint_url": self.endpoint}

    def url(self, name: str | None = None) -> str:
        return "gs" + super().url(name).removeprefix("s3")

    def filesystem(self, **_options: Any) -> Any:
        """The driver as it is."""
        return gcsfs.GCSFileSystem(skip_instance_cache=True, **self.storage_options)

    def _make_buckets(self, fs: Any) -> None:
        """It is there from the start."""
