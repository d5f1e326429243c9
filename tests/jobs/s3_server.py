"""An object store for tests: as much of the S3 protocol as pyarrow's client speaks, in memory, without logins."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    uploads: dict[str, dict[int, bytes]]

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        if self._key():
            self._get(with_body=True)
        else:
            self._list()

    def do_PUT(self) -> None:
        query, body = self._query(), self._body()
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            found = self.objects.get(unquote(source).lstrip("/").removeprefix(f"{BUCKET}/"))
            if found is None:
                self._fail(404, "NoSuchKey")
                return
            self.objects[self._key()] = found
            self._answer(200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
        elif "uploadId" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._answer(200, ETag='"x"')
        else:
            self.objects[self._key()] = body
            self._answer(200, ETag='"x"')

    def do_POST(self) -> None:
        query, body = self._query(), self._body()
        if "uploads" in query:
            upload = f"u{len(self.uploads)}"
            self.uploads[upload] = {}
            self._answer(200, f"<R><Key>{self._key()}</Key><UploadId>{upload}</UploadId></R>".encode())
        elif "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"][0])
            self.objects[self._key()] = b"".join(parts[number] for number in sorted(parts))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        else:  # delete many
            for key in ET.fromstring(body).iter():
                if key.tag.endswith("Key"):
                    self.objects.pop(key.text or "", None)
            self._answer(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        self.objects.pop(self._key(), None)
        self._answer(204)

    def _get(self, *, with_body: bool) -> None:
        key = self._key()
        content = self.objects.get(key) if key else b""
        if content is None:
            self._fail(404, "NoSuchKey")
            return
        asked = self.headers.get("Range")
        if asked and with_body:
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self._answer(206, part, **{"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"})
        else:
            self._answer(200, content, with_body=with_body, ETag='"x"')

    def _list(self) -> None:
        query = self._query()
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        root = ET.Element("ListBucketResult")
        ET.SubElement(root, "IsTruncated").text = "false"
        folders = set()
        for key, content in sorted(self.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            entry = ET.SubElement(root, "Contents")
            for tag, text in (("Key", key), ("Size", len(content)), ("LastModified", "2026-11-30T00:00:00.000Z")):
                ET.SubElement(entry, tag).text = str(text)
        for folder in sorted(folders):
            ET.SubElement(ET.SubElement(root, "CommonPrefixes"), "Prefix").text = folder
        ET.SubElement(root, "KeyCount").text = str(len(root) - 1)
        self._answer(200, ET.tostring(root))

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").removeprefix(BUCKET).lstrip("/")

    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._piece, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return body
        content = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16)
            content, body = content + body[:length], body[length + 2 :]
            if not length:
                break
        return content

    def _piece(self) -> bytes:
        """Of a body that is sent in pieces, each after its length; the last one is empty."""
        piece = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return piece

    def _fail(self, code: int, reason: str) -> None:
        self._answer(code, f"<Error><Code>{reason}</Code><Message>{reason}</Message></Error>".encode())

    def _answer(self, code: int, body: bytes = b"", *, with_body: bool = True, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def s3_server() -> Iterator[tuple[dict[str, str], dict[str, bytes]]]:
    """The variables with which clients find the store, and its objects by key."""
    handler = type("Handler", (_Handler,), {"objects": {}, "uploads": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
    }
    try:
        yield variables, handler.objects
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
