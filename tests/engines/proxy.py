"""A TCP proxy before one HTTP server that fails on purpose: at a request, known by its path, before the server has it,
while the server is at it, or when its answer is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

# before: the server does not get the request. inside: it has it all. after: its answer is there, and is lost.
Moment = Literal["before", "inside", "after"]


@dataclass
class Trap:
    """act: called at that moment of one request to the path; cut: whether both its connections then end"""

    path: str
    moment: Moment
    act: Callable[[], None]
    cut: bool
    delay: float = 0.0


class Proxy:
    """server: gives the port behind, which may change. Use as `async with`; `url` then stays the same."""

    def __init__(self, server: Callable[[], int]) -> None:
        self._server = server
        self._traps: list[Trap] = []
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._port = 0
        self.sprung: list[Trap] = []
        self.seen: list[str] = []
        self.silent = False  # whether requests are swallowed, and never answered

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def trap(
        self,
        path: str,
        moment: Moment,
        act: Callable[[], None] = lambda: None,
        *,
        cut: bool = True,
        delay: float = 0.0,
    ) -> None:
        """At the next request to this path, once. delay: seconds after `inside`"""
        self._traps.append(Trap(path, moment, act, cut, delay))

    async def __aenter__(self) -> Proxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Cut what there is, and refuse new connections until `listen`."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.cut()
        while self._connections:
            await asyncio.sleep(0.005)

    def cut(self) -> None:
        """Cut every connection."""
        for task in self._connections:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        behind: asyncio.StreamWriter | None = None
        try:
            answers, behind = await asyncio.open_connection("127.0.0.1", self._server())
            while await self._exchange(reader, writer, answers, behind):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side is gone, or we cut it
        finally:
            self._connections.discard(task)
            for end in (writer, behind):
                if end is not None:
                    with suppress(OSError):
                        end.transport.abort()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        behind: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; False when the connection is to be cut."""
        request = await _message(reader)
        path = request.split(b" ", 2)[1].decode().partition("?")[0]
        self.seen.append(path)
        trap = next((t for t in self._traps if t.path == path), None)
        if trap is not None:
            self._traps.remove(trap)
            self.sprung.append(trap)
        if trap is not None and trap.moment == "before":
            trap.act()
            if trap.cut:
                return False
        if self.silent:
            await asyncio.Event().wait()
        behind.write(request)
        await behind.drain()
        if trap is not None and trap.moment == "inside":
            await asyncio.sleep(trap.delay)
            trap.act()
            if trap.cut:
                return False
        answer = await _message(answers)
        if trap is not None and trap.moment == "after":
            trap.act()
            if trap.cut:
                return False
        writer.write(answer)
        await writer.drain()
        return True


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A whole request or answer; its body has a content-length, or comes in chunks, or there is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if fields.get(b"transfer-encoding") == b"chunked":
        return head + await _chunks(reader)
    return head + await reader.readexactly(int(fields.get(b"content-length", 0)))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    out = b""
    while True:
        size = await reader.readuntil(b"\r\n")
        chunk = await reader.readexactly(int(size, 16) + 2)
        out += size + chunk
        if len(chunk) == 2:
            return out
