"""Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 30


class Chromium:
    """One page; `events` are all that the browser has told of it."""

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise RuntimeError(f"none of {', '.join(PROGRAMS)} is installed; make test-browser does it where it can")
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-port=0", f"--user-data-dir={self._home.name}", "about:blank"]
        self._log = Path(self._home.name, "log").open("wb")  # noqa: SIM115
        self._process = subprocess.Popen([program, *words], stdout=self._log, stderr=self._log, start_new_session=True)
        self.events: list[dict[str, Any]] = []
        self._calls = 0
        self._socket = websocket.create_connection(self._page(), suppress_origin=True, timeout=PATIENCE)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def _page(self) -> str:
        port = Path(self._home.name, "DevToolsActivePort")
        until = time.monotonic() + PATIENCE
        while not (port.exists() and port.read_text().count("\n")):
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"chromium did not start: {Path(self._home.name, 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        return str(pages[0]["webSocketDebuggerUrl"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file, on a screen of this size, and wait until it is loaded."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < until, "the page did not load"
            self.run("0")  # collects events
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Evaluate an expression, await it if it is a promise, and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, and exceptions."""
        found = []
        for event in self.events:
            kind, params = event.get("method"), event.get("params", {})
            loud = kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
            logged = kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
            if loud or logged or kind == "Runtime.exceptionThrown":
                found.append(json.dumps(params)[:500])
        return found

    def requested(self) -> list[str]:
        """Return the addresses that the page asked for."""
        asked = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in asked]

    def screenshot(self, path: Path) -> None:
        """Write what the screen shows as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def cpu_seconds(self) -> float:
        """Return the processor time of all the browser's processes so far, which other programs do not add to."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if int(fields[3]) == self._process.pid:  # its session
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._home.cleanup()
