"""A headless Chromium, driven over its DevTools pipe: what a page measures, logs, requests and looks like.

The protocol is JSON messages that end with a NUL byte, on the file descriptors 3 and 4 of the browser
(https://chromedevtools.github.io/devtools-protocol). Every wait has a deadline.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE = 60.0  # seconds that any one answer may take
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
)


def binary() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a browser of its own. console: what it logged as an error or threw; requests: URLs that it asked for.

    Raises TimeoutError when the browser does not answer, RuntimeError when it says that it can't, or a script throws.
    """

    def __init__(self, width: int = 1100, height: int = 900, *, dark: bool = False) -> None:
        path = binary()
        assert path is not None, "no Chromium on this machine"
        self.console: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        # The shell moves the two ends to the numbers that the browser looks at.
        command = f'exec "$@" 3<&{reads} 4>&{writes}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                command,
                "bash",
                path,
                *FLAGS,
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._buffer, self._next, self._session, self._loaded = b"", 0, "", False
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.scheme(dark)

    def scheme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self._loaded = False
        self.send("Page.navigate", url=path.resolve().as_uri())
        ends = time.monotonic() + DEADLINE
        while not self._loaded:
            self._take(ends)

    def evaluate(self, script: str) -> Any:
        """The JSON value of an expression."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """One key by its DOM name, such as Tab (9), Enter (13, text \\r), Escape (27)."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """The mouse on the middle of the first element that a selector finds."""
        box = self.evaluate(
            f"(() => {{const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG, also written to a file."""
        png = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.write_bytes(png)
        return png

    def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its answer."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + DEADLINE
        while (answer := self._take(ends)).get("id") != message["id"]:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _take(self, ends: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser gives no answer")
            got = os.read(self._from, 1 << 20)
            if not got:
                raise RuntimeError(f"the browser ended with {self._process.wait(5)}")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.console.append(str(params["exceptionDetails"].get("exception", params)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.console.append(params["entry"]["text"])
        return message

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()
