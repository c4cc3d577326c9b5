"""A headless Chromium, driven by the DevTools protocol over a pipe (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
PATIENCE = 30.0  # seconds
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}
CONTROL, SHIFT = 2, 8


class Browser:
    """One page in a browser of its own.

    Args:
        profile: an empty folder for the browser's files.

    Attributes:
        faults: errors of the console and of the network, uncaught exceptions, violations of the security policy.
    """

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]

        def connect() -> None:  # the protocol is spoken on the descriptors 3 and 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._read, self._number, self._session = b"", 0, None
        self.faults: list[str] = []
        page = next(each for each in self._targets() if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScrollbarsHidden", hidden=True)

    def _targets(self) -> list[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        while not (found := self.call("Target.getTargets")["targetInfos"]):
            assert time.monotonic() < end, "the browser has no page"
        return found

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert self._selector.select(PATIENCE), "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(str(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.faults.append(str(given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.faults.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of a JavaScript expression, once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Text at the cursor."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def tab_to(self, selector: str) -> None:
        """Move the focus to an element by the Tab key alone."""
        for _ in range(100):
            if self.evaluate(f"document.activeElement === document.querySelector({json.dumps(selector)})"):
                return
            self.press("Tab")
        raise AssertionError(f"{selector} cannot be reached by Tab")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, **features: str) -> None:
        """User preferences: `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        os.close(self._in)
