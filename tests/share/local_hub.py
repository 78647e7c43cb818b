"""A hub on this machine that takes uploads: what huggingface_hub asks of the real one, and no more.

Repositories are dictionaries of bytes. A test may put anything there, as a stranger might.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """repositories: id -> path -> bytes; private: ids; lfs: (id, path) -> the SHA-256 that is
    listed; sizes: likewise; asked: "METHOD path" of every request; tokens: what was sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.branches: set[str] = set()
        self.lfs: dict[tuple[str, str], str] = {}
        self.sizes: dict[tuple[str, str], int] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit_of(self, name: str) -> str:
        digest = hashlib.sha1(name.encode())
        for path, data in sorted(self.repositories[name].items()):
            digest.update(path.encode() + data)
        return digest.hexdigest()

    def about(self, name: str) -> dict[str, Any]:
        files = []
        for path, data in self.repositories[name].items():
            size = self.sizes.get((name, path), len(data))
            file: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "0" * 40}
            if (sha256 := self.lfs.get((name, path))) is not None:
                file["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
            files.append(file)
        return {
            "id": name, "modelId": name, "sha": self.commit_of(name), "siblings": files,
            "private": name in self.private,
        }  # fmt: skip


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self, value: Any, code: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        return path

    def do_GET(self) -> None:
        path, repositories = self._path(), self.server.repositories
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*)?", path):
            known = match[1] in repositories
            missing = {"X_Error_Code": "RepoNotFound"}
            return (
                self._answer(self.server.about(match[1]))
                if known
                else self._answer({}, 404, **missing)
            )
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", path):
            return self._answer(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in repositories[match[1]].items()
                ]
            )
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        data = repositories.get(match[1], {}).get(match[2]) if match else None
        if match is None or data is None:
            return self._answer({}, 404, X_Error_Code="EntryNotFound")
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return self._answer(data, ETag=etag, X_Repo_Commit=self.server.commit_of(match[1]))

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        path = self._path()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            if name in self.server.repositories:
                return self._answer({"url": f"{self.server.endpoint}/{name}"}, 409)
            self.server.repositories[name] = {}
            if given.get("private") or given.get("visibility") == "private":
                self.server.private.add(name)
            return self._answer({"url": f"{self.server.endpoint}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path)
        if match is None:
            return self._answer({}, 404)
        name, what = match[1], match[2]
        if what == "branch":
            self.server.branches.add(match[3])
            return self._answer({})
        if what == "preupload":
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer(
                {"files": [{"path": f["path"], **mode} for f in json.loads(body)["files"]]}
            )
        files = self.server.repositories[name]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "deletedFile":
                files.pop(line["value"]["path"])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = self.server.commit_of(name)
        return self._answer(
            {"commitOid": oid, "commitUrl": f"{self.server.endpoint}/{name}/commit/{oid}"}
        )

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""
