"""The socket between driver and worker: messages come whole and in order, however the bytes are cut."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.runtime.channel import AT_ONCE, Channel, receive_first

MESSAGES = st.lists(st.integers(1, 3000).map(lambda n: bytes([n % 256]) * n), min_size=1, max_size=8)


def framed(messages: list[bytes]) -> bytes:
    return b"".join(len(m).to_bytes(4, "little") + m for m in messages)


@settings(deadline=None)
@given(MESSAGES, st.lists(st.integers(1, 4000), min_size=1, max_size=12))
def test_messages_come_whole_and_in_order(messages: list[bytes], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        data, came = framed(messages), []
        while data:
            cut = cuts[len(came) % len(cuts)]
            theirs.sendall(data[:cut])
            data = data[cut:]
            frames, is_open = channel.receive()
            assert is_open
            came += frames
        assert came == messages
        assert channel.receive() == ([], True)


@pytest.mark.parametrize("size", [1, AT_ONCE - 4, AT_ONCE, 5 * AT_ONCE + 1])
def test_what_the_socket_does_not_take_at_once_is_sent_when_it_does(size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        a, b = Channel(ours), Channel(theirs)
        sent, came = [bytes([i]) * size for i in range(3)], []
        for message in sent:
            a.put(message)
        for _ in range(10_000):
            a.flush()
            came += b.receive()[0]
            if not a.outbox and len(came) == 3:
                break
        assert came == sent


def test_the_end_is_seen_after_the_last_message() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        with theirs:
            theirs.sendall(framed([b"last"]) + b"\5\0\0\0half")
        seen = [channel.receive() for _ in range(2)]
        assert [frames for frames, _ in seen] == [[b"last"], []]
        assert not seen[-1][1]
        channel.put(b"to nobody")
        with pytest.raises(ConnectionError):
            channel.flush()


@pytest.mark.parametrize(
    ("data", "first"),
    [(framed([b"setup", b"fire"]), b"setup"), (b"", None), (b"\5\0", None), (b"\5\0\0\0set", None)],
)
def test_the_first_message_is_waited_for_and_no_more_is_read(data: bytes, first: bytes | None) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        assert receive_first(ours) == first
        if first is not None:
            assert Channel(ours).receive()[0] == [b"fire"]
