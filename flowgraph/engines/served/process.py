"""A server process that we start: on a free port, in a session of its own, with a log, ended when this process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from flowgraph.engines.sync import ReplicaError


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ServerProcess:
    """python: the interpreter; arguments: port → what it runs (`-m`, module, options); log: where its output goes

    variables: its whole environment, so that a variable can be left out
    """

    def __init__(
        self,
        python: str,
        arguments: Callable[[int], Sequence[str]],
        *,
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        self._python, self._arguments, self._variables, self.log = python, arguments, variables, log
        self._process: subprocess.Popen[bytes] | None = None
        self._named: set[Path] = set()  # what it had in /dev/shm when it was ready
        self.port = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def launch(self) -> None:
        """Start it; what ran before is ended. Raises ReplicaError when there is no such interpreter."""
        self.end()
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        under = str(Path(__file__).with_name("under.py"))
        command = [self._python, under, str(os.getpid()), *self._arguments(self.port)]
        with self.log.open("ab") as out:
            try:
                self._process = _start(command, self._variables, out)
            except OSError as error:
                raise ReplicaError(f"{self._python} can't be run: {error}") from error

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ended(self) -> str:
        """How it ended, and the last it said."""
        code = self._process.poll() if self._process is not None else None
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return f"its process {how}{self._last_words()}; see {self.log}"

    def end(self) -> None:
        """Kill it and all that it started, and remove what they had in /dev/shm. Harmless when repeated."""
        if self._process is not None:
            named = self._named | _named_memory(self._process.pid)
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it is gone, or leads no session yet
                self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that the kernel can't end now is no longer asked
                self._process.wait(10.0)
            self._process = None
            for path in named:
                with suppress(OSError):
                    path.unlink()
            self._named = set()

    async def until(self, ready: Callable[[], object], seconds: float) -> None:
        """Wait until `ready` gives no ReplicaError. Raises ReplicaError when the process ended, TimeoutError when it
        runs but is not ready.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            if not self.alive():
                raise ReplicaError(self.ended())
            try:
                await ready()  # type: ignore[misc]
                self._named = _named_memory(self.pid)
                return
            except ReplicaError as error:
                if loop.time() > end:
                    raise TimeoutError(f"it was not ready in {seconds:.0f} s: {error}") from error
            await asyncio.sleep(0.1)

    def _last_words(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
                lines = [x for x in log.read().decode(errors="replace").splitlines() if x.strip()]
        except OSError:
            return ""
        errors = [x for x in lines if "Error" in x][-1:] or lines[-1:]
        return "".join(f": {line.strip()[:300]}" for line in errors)


def _named_memory(session: int) -> set[Path]:
    """The files in /dev/shm that a session's processes, and nobody else, have mapped. A killed server leaves them.

    By inode: a named semaphore is mapped under a first name, and then gets its own.
    """
    ours: set[int] = set()
    others: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found = {int(x.split()[4]) for x in maps.read_text().splitlines() if " /dev/shm/" in x}
            of = ours if os.getsid(int(maps.parent.name)) == session else others
        except (OSError, IndexError):
            continue
        of |= found
    return {path for path in Path("/dev/shm").iterdir() if _inode(path) in ours - others}


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except OSError:  # it is gone already
        return 0


def _start(command: list[str], variables: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(variables))


def interpreter(python: str | None) -> str:
    """The Python that runs a server: the given one, else ours."""
    return os.path.expanduser(python) if python else sys.executable
