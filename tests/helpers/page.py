"""What ``plan.html`` holds, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SILENT = ("first-run", "sandbox")
LEFT_OUT = ("background-networking", "component-update", "gpu", "quic", "sync")
QUIET = ["--headless", *(f"--no-{one}" for one in SILENT), *(f"--disable-{one}" for one in LEFT_OUT)]
VOID = {"meta", "input", "!doctype", "link", "br", "img"}


def embedded(page: str, name: str) -> Any:
    """The JSON that a page has in the element of that name."""
    (text,) = re.findall(f'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


class Nesting(HTMLParser):
    """Which elements are open; complains about one that is closed where another one was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, tag


WIDTHS_AND_SCHEMES = [(390, "dark"), (1280, "light"), (390, "light"), (1280, "dark")]
LAYOUT = """
    const wide = document.documentElement.scrollWidth, window = document.documentElement.clientWidth;
    const color = name => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number);
    const matrix = document.querySelector(".matrix")?.getBoundingClientRect().width ?? 0;
    return {wide, window, matrix, background: color("backgroundColor"), ink: color("color")};"""


def assert_layout(page: str, folder: Path, width: int, scheme: str, wait: int = 0) -> None:
    """Check that a page is as wide as the window, its confusion matrix at most 400 pixels, and its colours readable."""
    allowed = page.replace("img-src data:", "img-src data:; script-src 'unsafe-inline'")
    found = answered(allowed, LAYOUT, folder, width, scheme, wait)
    assert width - 20 <= found["window"] <= width, found  # a scroll bar takes some of it
    assert found["wide"] == found["window"], found
    assert found["matrix"] <= min(400, width), found
    dark, light = ("background", "ink") if scheme == "dark" else ("ink", "background")
    assert max(found[dark]) < 60, found
    assert min(found[light]) > 200, found


def answered(
    page: str, script: str, folder: Path, width: int | None = None, scheme: str = "light", wait: int = 0
) -> Any:
    """What ``script``, added to the end of a page, returns in a browser, as JSON holds it. With a ``width`` in pixels,
    the page is in a frame, because a window has a minimum width. The user prefers the colour ``scheme``. The script
    runs after ``wait`` milliseconds of the browser's own time, which passes only while nothing is computed."""
    assert BROWSER is not None
    path = folder / "asked.html"
    ask = f"top.document.body.textContent = JSON.stringify((() => {{ {script} }})())"
    ask = f"setTimeout(() => {{ {ask} }}, {wait})" if wait else ask
    content = page.replace("</html>", f"<script>{ask}</script></html>")
    if width is not None:
        meta = '<meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        content = f'{meta}<iframe style="border: 0; width: {width}px" srcdoc="{escape(content)}"></iframe>'
    path.write_text(content)
    flags = [f"--blink-settings=preferredColorScheme={int(scheme != 'dark')}", f"--user-data-dir={folder / 'browser'}"]
    flags += [f"--virtual-time-budget={2 * wait}"] if wait else []
    command = [BROWSER, *QUIET, *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (body,) = re.findall(r"<body[^>]*>(.*)</body>", done.stdout, re.DOTALL)
    return json.loads(unescape(body))
