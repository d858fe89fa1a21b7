"""A receiver of webhooks that misbehaves on purpose: receiver.py PORT FILE [CERTIFICATE KEY]

The first word of the path says how it behaves. What it takes for received is written to FILE, one
JSON document a line, before it answers; so a kill loses nothing that was answered for.
"""

import asyncio
import base64
import gzip
import json
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TextIO
from urllib.parse import parse_qs, urlsplit

METADATA = "http://169.254.169.254/latest/meta-data/"


class Request(NamedTuple):
    path: str
    query: dict[str, list[str]]
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return dict(self.headers).get(name, "")


class Hangup(Exception):
    """The connection ends here."""


async def read_request(reader: asyncio.StreamReader) -> Request:
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = []
    for each in filter(None, lines):
        name, _, value = each.partition(":")
        headers.append((name.lower(), value.strip()))
    parts = urlsplit(line.split(" ")[1])
    length = int(dict(headers).get("content-length", "0"))
    return Request(parts.path, parse_qs(parts.query), headers, await reader.readexactly(length))


class Receiver:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def record(self, request: Request) -> None:
        body = base64.b64encode(request.body).decode()
        line = {"path": request.path, "headers": request.headers, "body": body}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_request(reader)
                await self.behave(request, writer)
                await writer.drain()
        except (Hangup, ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def behave(self, request: Request, writer: asyncio.StreamWriter) -> None:
        word = request.path.split("/")[1]
        misdeed = MISDEEDS.get(word)
        if misdeed is not None:
            return await misdeed(self, request, writer)
        if request.header("ce-type") == "refuse-me":
            return self.answer(writer, 422, b'{"error": "no such order"}', "application/json")
        self.record(request)
        return self.answer(writer, 200)

    def answer(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes = b"",
        kind: str = "text/plain",
        *more: str,
    ) -> None:
        head = [f"HTTP/1.1 {status} Said", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, *more, "", ""]).encode() + body)


async def trickle(writer: asyncio.StreamWriter, piece: bytes, seconds: float) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(seconds)


async def status(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    """/status/NNN?header=Name:value&body=text"""
    number = int(request.path.split("/")[2])
    receiver.record(request)
    body = request.query.get("body", [""])[0].encode()
    receiver.answer(writer, number, body, "text/plain", *request.query.get("header", []))


async def redirect(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    to = request.query.get("to", [METADATA])[0]
    receiver.answer(writer, 302, b"", "text/plain", f"Location: {to}")


async def silent(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    receiver.record(request)
    await asyncio.sleep(3600)


async def moody(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    """Silent about one type of message only."""
    if request.header("ce-type") == "silence-me":
        await asyncio.sleep(3600)
    receiver.record(request)
    receiver.answer(writer, 200)


async def slow_headers(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    await trickle(writer, b"x", 0.05)


async def huge_headers(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    await trickle(writer, b"X-Huge: " + b"x" * 8000 + b"\r\n", 0)


async def endless_body(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    receiver.record(request)
    number = int(request.path.split("/")[2])
    writer.write(b"HTTP/1.1 %d Said\r\nTransfer-Encoding: chunked\r\n\r\n" % number)
    await trickle(writer, b"2000\r\n" + b"x" * 0x2000 + b"\r\n", 0)


async def slow_body(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    receiver.record(request)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    await trickle(writer, b"x", 0.05)


async def early_close(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    raise Hangup


async def wrong_length(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    receiver.record(request)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort")
    await writer.drain()
    raise Hangup


async def half_head(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    await writer.drain()
    raise Hangup


async def gzip_bomb(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    receiver.answer(writer, 500, bomb, "text/plain", "Content-Encoding: gzip")


async def storm(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    await trickle(writer, b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, 0)


async def shower(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    receiver.record(request)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 50)
    receiver.answer(writer, 204)


async def not_http(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()
    raise Hangup


async def switch(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")


async def close_after(receiver: Receiver, request: Request, writer: asyncio.StreamWriter) -> None:
    """Promise to keep the connection, and end it: now and then just as the next request comes."""
    receiver.record(request)
    receiver.answer(writer, 200)
    await writer.drain()
    await asyncio.sleep(float(request.query.get("after", ["0"])[0]))
    raise Hangup


Misdeed = Callable[[Receiver, Request, asyncio.StreamWriter], Awaitable[None]]
MISDEEDS: dict[str, Misdeed] = {
    each.__name__: each
    for each in (
        *(status, redirect, silent, moody, slow_headers, huge_headers, endless_body, slow_body),
        *(early_close, wrong_length, half_head, gzip_bomb, storm, shower, not_http, switch),
        close_after,
    )
}


async def main(port: int, path: str, certificate: str = "", key: str = "") -> None:
    context = None
    if certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
    with open(path, "a") as file:
        server = await asyncio.start_server(
            Receiver(file).serve, "127.0.0.1", port, ssl=context, limit=2**20
        )
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
