"""A headless Chromium, driven through ChromeDriver by the W3C's WebDriver protocol.

  python -m tests.browser docs/live-page.png

takes the picture of the live page in the documentation, of a server of the bundled model.
"""

import argparse
import base64
import contextlib
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.process import serving

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
"""Programs that are not there; Debian's packages chromium and chromium-driver have them."""

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""What WebDriver calls a reference to an element."""

_CONTRASTS = """
const numbers = color => (color.match(/[\\d.]+/g) ?? []).map(Number);
const clear = color => numbers(color)[3] === 0 || !numbers(color).length;
const light = color => numbers(color).slice(0, 3).map(each => each / 255).map(
  each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4
).reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
const ground = element => {
  const rect = element.closest('.node')?.querySelector('rect');
  if (rect) return getComputedStyle(rect).fill;
  for (let each = element; each; each = each.parentElement) {
    const own = getComputedStyle(each).backgroundColor;
    if (!clear(own)) return own;
  }
};
const found = {};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, style = getComputedStyle(element);
  if (!walker.currentNode.data.trim() || !element.checkVisibility?.()) continue;
  const color = element instanceof SVGElement ? style.fill : style.color;
  const [one, other] = [light(color), light(ground(element))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const name = `${element.tagName}.${element.getAttribute('class')}`;
  found[name] = Math.min(found[name] ?? Infinity, ratio);
}
return found;
"""
"""Of WCAG: the least ratio of the luminances of each kind of text and what is behind it."""


class Browser:
    """A window of a session.

    Args:
      session: of ChromeDriver, with the session's address.
    """

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._session.post(path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value["message"]
        return value

    def open(self, url: str) -> None:
        """Goes to an address and waits until its page is loaded."""
        self._ask("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function gives."""
        return self._ask("execute/sync", script=script, args=arguments)

    def text(self, selector: str) -> str:
        """The text of the first element of a selector, as it is shown."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def count(self, selector: str) -> int:
        """How many elements a selector has."""
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def _element(self, selector: str) -> str:
        return self._ask("element", using="css selector", value=selector)[_ELEMENT]

    def click(self, selector: str) -> None:
        """Clicks on the first element of a selector, as a mouse does."""
        self._ask(f"element/{self._element(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        """Types a text into a field."""
        self._ask(f"element/{self._element(selector)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Presses keys one after the other, by the codes of WebDriver."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def point(self, selector: str, x: int = 0, y: int = 0) -> None:
        """Moves the mouse to a place, counted from the middle of an element."""
        origin = {_ELEMENT: self._element(selector)}
        move = {"type": "pointerMove", "x": x, "y": y, "origin": origin}
        self._ask("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the page a size, narrower than a window can be, too."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """Sets what the reader prefers: `color_scheme="dark"`, `reduced_motion="reduce"`."""
        wanted = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        self._command("Emulation.setEmulatedMedia", features=wanted)

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._ask("goog/cdp/execute", cmd=name, params=parameters)

    @contextlib.contextmanager
    def another_tab(self) -> Iterator[None]:
        """Leaves the page open in a tab behind another one for a while."""
        first = self._session.get("window").json()["value"]
        other = self._ask("window/new", type="tab")["handle"]
        self._ask("window", handle=other)
        try:
            yield
        finally:
            self._session.delete("window")
            self._ask("window", handle=first)

    def contrasts(self) -> dict[str, float]:
        """The contrast of each kind of text that is shown, by its element."""
        return self.run(_CONTRASTS)

    def picture(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self._session.get("screenshot").json()["value"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the page's console since the last time."""
        lines = self._ask("se/log", type="browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def until(self, holds: Callable[["Browser"], Any], seconds: float = 15.0) -> Any:
        """What a condition gives, once it gives something; fails if that takes too long."""
        end = time.monotonic() + seconds
        while not (found := holds(self)):
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser of its own, which knows nothing and is ended in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="specjax-chromium-", ignore_cleanup_errors=True) as own,
        _driver() as url,
        httpx.Client(base_url=url, timeout=60) as driver,
    ):
        flags = [*_FLAGS, f"--user-data-dir={own}", "--window-size=1280,900"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()
        path = f"/session/{made['value']['sessionId']}"
        try:
            with httpx.Client(base_url=f"{url}{path}", timeout=60) as session:
                yield Browser(session)
        finally:
            driver.delete(path)


@contextlib.contextmanager
def _driver() -> Iterator[str]:
    """The address of a ChromeDriver at a free port."""
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "successfully on port" in line)
            yield f"http://127.0.0.1:{line.strip().rstrip('.').split()[-1]}"
        finally:
            process.terminate()


@contextlib.contextmanager
def busy(url: str, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """Sends each of the bodies for completions again and again, until it is left."""
    ends = threading.Event()

    def send(body: dict[str, Any]) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not ends.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


_PROMPTS = (
    "def quicksort(items):\n", "class Stack:\n    def __init__(self",
    "import argparse\n\n\ndef main(", "def fibonacci(n):\n    if n",
)  # fmt: skip
_LOADS, _LOAD_SECONDS = (1, 2, 4), 12
"""Requests at a time, one load after the other, and how long each stays."""


def _take_picture(path: Path, width: int, height: int) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0.8 * (at % 2)}
        for at, prompt in enumerate(_PROMPTS)
    ]
    flags = ("--model", "bundled", "--rows", "4", "--settings", "all", "--port", "0")
    with serving(*flags) as (url, _), browsing() as browser:
        browser.resize(width, height)
        browser.prefer(reduced_motion="reduce")
        browser.open(url)
        choose = "const own = document.getElementById('window'); own.value = '30';"
        browser.run(f"{choose} own.dispatchEvent(new Event('change'))")
        for load in _LOADS:
            with busy(url, bodies[:load]):
                time.sleep(_LOAD_SECONDS)
                if load == _LOADS[-1]:
                    browser.until(_shows_a_tree, 60)
                    path.write_bytes(browser.picture())


def _shows_a_tree(browser: Browser) -> bool:
    """Whether the tree of a step has some branches, of which a part was accepted."""
    nodes, taken = browser.count("#tree .node"), browser.count("#tree .node.taken")
    return nodes > 7 and taken > 2 and browser.count(".card") == _LOADS[-1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1040)
    options = parser.parse_args()
    _take_picture(options.path, options.width, options.height)


if __name__ == "__main__":
    main()
