"""HTTP to one server: connections are kept, every call has a deadline, and what can fail has one of three names."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import aiohttp
import msgspec

from flowgraph.engines.sync import ReplicaError

# Shorter than a server's own (uvicorn: 5 s), so that we never send on a connection which it is about to close.
KEEP_ALIVE = 3.0
LARGE = 1 << 20  # bytes above which aiohttp wants a stream
JSON, BYTES = "application/json", "application/octet-stream"


class Refused(ReplicaError):
    """The server is there, and answered that it will not or could not."""

    def __init__(self, where: str, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(f"{where} answered {status}: {text}")


class Cut(ReplicaError):
    """No whole answer came: the connection was refused, cut, or the server ended. What it did of it is unknown."""


class Client:
    """One server's address, and the connections to it. Belongs to the event loop that first uses it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def ask(self, path: str, body: Any = None, *, seconds: float, form: Any = Any) -> Any:
        """The answer to GET, or to POST when there is a body, read as JSON of this form (None: not read).

        A body of bytes is sent as it is, any other as JSON.

        Raises Refused for any status but 200 and an answer of another form, Cut when no whole answer came in `seconds`.
        """
        if self._closed:
            raise Cut(f"{self.url}{path}: the connections to it were closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            self._session = aiohttp.ClientSession(connector=connector)
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, 10.0))
        try:
            plain = isinstance(body, bytes | bytearray)
            data = body if plain or body is None else msgspec.json.encode(body)
            if data is not None and len(data) > LARGE:
                data = io.BytesIO(data)
            headers = {"content-type": BYTES if plain else JSON}
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                raw = await reply.read()
        except TimeoutError as error:
            raise Cut(f"{self.url}{path} did not answer in {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise Cut(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if reply.status != 200:
            raise Refused(f"{self.url}{path}", reply.status, _message(raw))
        if form is None or not raw:
            return None
        try:
            return msgspec.json.decode(raw, type=form)
        except msgspec.DecodeError as error:
            raise Refused(f"{self.url}{path}", 200, f"{error}: {raw[:200]!r}") from error

    async def close(self) -> None:
        """End what is under way, by Cut. Harmless when repeated."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None


def _message(raw: bytes) -> str:
    """What an error answer says, in whichever of the usual forms."""
    text = raw.decode(errors="replace").strip()
    try:
        said = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return text[:500]
    while isinstance(said, dict):
        said = said.get("error", said.get("message", said.get("detail", str(said))))
    return str(said)[:500]
