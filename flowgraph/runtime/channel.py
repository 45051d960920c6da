"""One end of the socket between driver and worker: whole messages in, whole messages out, and nothing that blocks.

A message is four bytes of its length, little-endian, and then itself.
"""

from __future__ import annotations

import socket

AT_ONCE = 1 << 16  # bytes
HEAD = 4  # bytes of a length


class Channel:
    """outbox: bytes that wait until the socket takes them; inbox: of a message that has come in part."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.outbox = bytearray()
        self.inbox = bytearray()
        sock.setblocking(False)

    def put(self, data: bytes) -> None:
        """A message for the next flush."""
        self.outbox += len(data).to_bytes(HEAD, "little")
        self.outbox += data

    def flush(self) -> None:
        """Send what the socket takes now. Raises ConnectionError when nobody listens."""
        while self.outbox:
            try:
                sent = self.sock.send(self.outbox)
            except BlockingIOError:
                return
            del self.outbox[:sent]

    def receive(self) -> tuple[list[bytes], bool]:
        """Whole messages that have come, and whether the other end is still open."""
        is_open, more = True, True
        while more:
            try:
                data = self.sock.recv(AT_ONCE)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.inbox += data
            is_open, more = bool(data), len(data) == AT_ONCE
        frames = []
        while len(self.inbox) >= HEAD:
            end = HEAD + int.from_bytes(self.inbox[:HEAD], "little")
            if len(self.inbox) < end:
                break
            frames.append(bytes(self.inbox[HEAD:end]))
            del self.inbox[:end]
        return frames, is_open


def receive_first(sock: socket.socket) -> bytes | None:
    """The first message of a socket that still blocks; None when the other end is closed before it is whole."""
    head = sock.recv(HEAD, socket.MSG_WAITALL)
    size = int.from_bytes(head, "little")
    data = sock.recv(size, socket.MSG_WAITALL) if len(head) == HEAD else b""
    return data if data and len(data) == size else None
