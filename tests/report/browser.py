"""Drives a headless Chromium over its debugging pipe: no driver, no network, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60.0
END = b"\0"


def find_browser():
    """Return the browser's path; fail the test when there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, "no browser: install Debian's package 'chromium', or leave these tests out with -m 'not browser'"
    return found


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, profile):
        """Start it with ``profile`` as the directory for everything that it writes."""
        orders, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {flags} "--user-data-dir=$1" about:blank 3<&{orders} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, find_browser(), str(profile)], pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(orders)
        os.close(answers)
        self._read, self._events, self._number, self._session = b"", deque(), 0, None
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.ask("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def ask(self, method, **params):
        """Send an order and return its result; events that come before it are kept."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        os.write(self._out, json.dumps(order | ({"sessionId": self._session} if self._session else {})).encode() + END)
        while (message := self._message()).get("id") != self._number:
            self._events.append(message)
        assert "error" not in message, f"{method}: {message.get('error')}"
        return message["result"]

    def _message(self):
        deadline = time.monotonic() + WAIT_S
        while END not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        line, _, self._read = self._read.partition(END)
        return json.loads(line)

    def look_like(self, *, width, height=900, scheme="light", media="screen"):
        """Set the window's size in CSS pixels, the color scheme and the medium."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[feature])

    def scripts(self, *, allowed):
        """Let pages run scripts, or not."""
        self.ask("Emulation.setScriptExecutionDisabled", value=not allowed)

    def open(self, path):
        """Open a file or an address; return the addresses it asked for and what went wrong, as two lists."""
        self._events.clear()
        self.ask("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        self.evaluate("1")
        asked = [e["params"]["request"]["url"] for e in self._events if e.get("method") == "Network.requestWillBeSent"]
        return asked, [trouble for event in self._events if (trouble := _trouble(event))]

    def evaluate(self, script):
        """Return a script's value."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key, code):
        """Press and release a key, such as Tab, whose code is 9."""
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path):
        """Write the whole page as PNG."""
        box = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        data = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


def _trouble(event):
    params = event.get("params", {})
    if event.get("method") == "Runtime.exceptionThrown":
        return str(params["exceptionDetails"])
    if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return params["entry"]["text"]
    if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        return str(params["args"])
    return None
