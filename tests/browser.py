"""A headless Chromium for tests of pages: its DevTools protocol over one web socket."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT_S = 400
"""Only a browser that hangs takes so long."""


def find_chromium() -> str | None:
    """Path of an installed Chromium; the variable CHROMIUM comes first."""
    return next(
        filter(None, (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES))),
        None,
    )


class Page:
    """One tab. What the page or the browser complains about is kept in `complaints`."""

    def __init__(self, socket: Any):
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of a protocol method."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._take_event(message)

    def _take_event(self, message: dict[str, Any]) -> None:
        self._waiting.append(message)
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(str([argument.get("value") for argument in params["args"]]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"asked the network for {url}")

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show the file at a width in CSS pixels, in light or dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.resize(width, 900)
        self._waiting.clear()
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in answer, f"{path}: {answer['errorText']}"
        while not any(message.get("method") == "Page.loadEventFired" for message in self._waiting):
            self._take_event(json.loads(self._socket.recv()))

    def resize(self, width: int, height: int) -> None:
        """Size of the viewport in CSS pixels, at one device pixel each."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, of a promise when it is kept."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse to a place in the viewport."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, selector: str = "html", index: int = 0) -> Image.Image:
        """Picture of an element, also of what lies outside of the viewport."""
        box = self.evaluate(
            f"(() => {{ const r = document.querySelectorAll({selector!r})[{index}].getBoundingClientRect();"
            " return [r.x + scrollX, r.y + scrollY, r.width, r.height] })()"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")


def num_colored(picture: Image.Image) -> int:
    """Pixels that are not grey: ground, grid and text are grey on these pages, what is drawn has a
    colour.
    """
    pixels = np.asarray(picture, dtype=np.int64)
    return int((pixels.max(axis=2) - pixels.min(axis=2) > 40).sum())


@contextmanager
def open_browser(executable: str) -> Iterator[Page]:
    """A page of a browser of its own, with a profile of its own, without network."""
    import websocket

    # Helpers of the browser may write to the profile for a moment after it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                executable,
                "--headless=new",
                "--no-sandbox",  # tests may run as root in a container
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        watchdog = threading.Timer(_TIMEOUT_S, kill)
        watchdog.start()
        try:
            address = _find_address(process)
            watchdog.cancel()
            socket = websocket.create_connection(_find_tab(address), timeout=_TIMEOUT_S)
            yield Page(socket)
            socket.close()
        finally:
            watchdog.cancel()
            kill()
            process.wait()
            process.stderr.close()


def _find_address(process: subprocess.Popen[str]) -> str:
    """host:port of the protocol, which the browser prints when it is ready."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "DevTools listening on ws://" in line:
            threading.Thread(
                target=process.stderr.read, daemon=True
            ).start()  # a full pipe would stop it
            return line.split("ws://")[1].split("/")[0]
    raise AssertionError(f"Chromium did not start:\n{''.join(seen)}")


def _find_tab(address: str) -> str:
    """Address of the first tab, which may open a moment after the browser listens."""
    from urllib.request import ProxyHandler, build_opener

    direct = build_opener(ProxyHandler({}))  # this machine is not reached through a proxy
    end = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end:
        with direct.open(f"http://{address}/json/list", timeout=_TIMEOUT_S) as answer:
            for tab in json.load(answer):
                if tab["type"] == "page":
                    return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium opens no tab")
