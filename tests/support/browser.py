"""Pages as a browser draws them, where one is installed, and names that would harm one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needed = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed")
HOSTILE = "</script><script>document['title']='run'</script>"
IMAGE = "\"'><img src=x onerror=document['title']='run'>"


def drawn(folder: Path, page: str, script: str = "") -> str:
    """The page as the browser has drawn it, after a script of the test."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    return subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=120, check=True).stdout


def cells(dom: str, key: str) -> list[str]:
    """What the cells of a table hold, under one key."""
    return [html.unescape(value) for value in re.findall(rf'data-key="{key}" data-value="([^"]*)"', dom)]


def values_in(page: str) -> dict:
    """The JSON that stands in a page."""
    return json.loads(re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)[1])
