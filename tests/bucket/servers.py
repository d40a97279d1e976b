"""S3 servers and a bad network for the tests: SeaweedFS and moto as real servers, and a proxy that breaks things."""

import base64
import hmac
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

KEY, SECRET = "hacrlkey", "hacrlsecret"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
START_SECONDS = 90.0


def free_port() -> int:
    """A port that is free, and so is the one ten thousand above: SeaweedFS uses both."""
    while True:
        port = random.randint(20000, 40000)
        with suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10000))
            return port


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """A SeaweedFS server with its data in a folder; yields its address."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "weed is missing: make dev"
    folder.mkdir(parents=True, exist_ok=True)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
    (folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    # Services that nobody asked for have fixed ports: a second server on this machine would end at once.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-s3.config={folder / 'keys.json'}", "-volume.max=200", "-master.volumeSizeLimitMB=64"]
    with _process(command, folder / "log.txt", folder):
        address = f"http://127.0.0.1:{ports['s3']}"
        _wait(address)
        yield address


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """A moto server, everything in memory; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _process(command, folder / "log.txt", folder):
        address = f"http://127.0.0.1:{port}"
        _wait(address)
        yield address


# The account of Azure's emulator, the same everywhere by its documentation.
AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
    "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
    "K1SZFPTOtr/KBHBeksoGMGw==",
}
CLOUDS = Path(sys.prefix) / "clouds"  # make test-bucket installs the emulators there


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Microsoft's emulator of Azure Blob Storage; yields the address of its account."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    program = CLOUDS / "node_modules" / ".bin" / "azurite-blob"
    command = [str(program), "--silent", "--skipApiVersionCheck", "--location", str(folder)]
    with _process([*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)], folder / "log.txt", folder):
        _wait(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}/{AZURE['AZURE_STORAGE_ACCOUNT_NAME']}"


@contextmanager
def gcs(folder: Path) -> Iterator[str]:
    """An emulator of Google Cloud Storage with one bucket, ``team``; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [str(CLOUDS / "gcs" / "bin" / "gcp-storage-emulator"), "start", "--host", "127.0.0.1", "--port"]
    with _process([*command, str(port), "--in-memory", "--default-bucket", "team"], folder / "log.txt", folder):
        _wait(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def make_container(address: str, name: str) -> None:
    """Create a container of Azure's emulator, with a signature of its own kind."""
    parts, account = urlsplit(address), AZURE["AZURE_STORAGE_ACCOUNT_NAME"]
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{account}/{account}/{name}\nrestype:container"
    key = base64.b64decode(AZURE["AZURE_STORAGE_ACCOUNT_KEY"])
    signature = base64.b64encode(hmac.digest(key, signed.encode(), "sha256")).decode()
    headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("PUT", f"{parts.path}/{name}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()


@contextmanager
def _process(command: list[str], log: Path, folder: Path) -> Iterator[None]:
    """Run a server in a group of its own, and end the whole group."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, start_new_session=True)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break


def _wait(address: str) -> None:
    place = urlsplit(address).netloc
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = http.client.HTTPConnection(place, timeout=5)
            connection.request("GET", "/")
            if connection.getresponse().status < 500:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"{address} does not answer"
        time.sleep(0.2)


def make_bucket(address: str, name: str) -> None:
    """Create a bucket; the first seconds after its start SeaweedFS may still refuse."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=name)
            client.put_object(Bucket=name, Key="ready", Body=b"")
            client.delete_object(Bucket=name, Key="ready")
            return
        except (BotoCoreError, ClientError):
            assert time.monotonic() < deadline, f"{address}: no bucket {name}"
            time.sleep(0.3)


# -- a bad network -----------------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What the proxy does to requests; may be changed while it runs."""

    error_share: float = 0.0  # answered 500 without asking the server
    lost_share: float = 0.0  # done by the server, and the connection is cut before the answer
    torn_share: float = 0.0  # the answer is cut in its middle
    delay: float = 0.0
    away: bool = False  # the connection is closed at once
    skewed: bool = False  # refused as S3 refuses a client whose clock is off by an hour
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    counts: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)  # what the server said to each request

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


@contextmanager
def careless_server() -> Iterator[str]:
    """A small S3 server that knows no If-None-Match and overwrites in silence, as some do; yields its address."""
    objects: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"")

        def do_GET(self) -> None:
            self._answer(200 if self.path in objects else 404, objects.get(self.path, b""))

        def do_DELETE(self) -> None:
            objects.pop(self.path, None)
            self._answer(204, b"")

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response_only(status)
            self.send_header("ETag", '"0"')
            self.send_header("Last-Modified", self.date_time_string())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with _serving(Handler) as address:
        yield address


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def proxy(address: str, faults: Faults) -> Iterator[str]:
    """A proxy in front of a server that breaks a share of the requests; yields its address."""
    upstream = urlsplit(address).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if faults.away:
                faults.count("away")
                self._cut()
                return
            body = self.rfile.read(length) if length else None
            if faults.skewed:
                faults.count("skewed")
                self._answer(403, {}, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
                return
            faults.requests.append(f"{self.command} {self.path}")
            time.sleep(faults.delay)
            if faults.dice.random() < faults.error_share:
                faults.count("error")
                self._answer(500, {}, b"")
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection = http.client.HTTPConnection(upstream, timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
            except OSError:
                self._cut()
                return
            finally:
                connection.close()
            faults.answers.append((f"{self.command} {self.path}", answer.status))
            if faults.dice.random() < faults.lost_share:
                faults.count("lost")
                self._cut()
                return
            torn = self.command == "GET" and len(content) > 1 and faults.dice.random() < faults.torn_share
            self._answer(answer.status, dict(answer.getheaders()), content, torn=torn)

        def _answer(self, status: int, headers: dict[str, str], content: bytes, *, torn: bool = False) -> None:
            self.send_response_only(status)
            kept = {n: v for n, v in headers.items() if n.lower() not in ("transfer-encoding", "connection")}
            if self.command != "HEAD":
                kept = {n: v for n, v in kept.items() if n.lower() != "content-length"}
                kept["Content-Length"] = str(len(content))
            for name, value in kept.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if torn:
                faults.count("torn")
                self.wfile.write(content[: len(content) // 2])
                self._cut()
                return
            self.wfile.write(content)

        def _cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

        def log_message(self, *args: object) -> None:
            pass

    with _serving(Handler) as through:
        yield through
