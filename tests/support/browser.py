"""Pages as a browser draws them, where one is installed, and names that would harm one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


def hostile_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in (HOSTILE, IMAGE)))


def is_harmless(page: str) -> bool:
    """Whether no name became markup, and nothing is fetched from anywhere."""
    own = page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")  # a name, which nothing fetches
    asks = re.search(r"http|//[a-z]+\.|<link|@import|url\(|innerHTML|document\.write|eval\(", own)
    return page.count("<script") == 2 and "<img" not in page and "default-src 'none'" in page and not asks


def shows_what_is_saved(found: Any, folder: Path) -> bool:
    """Whether the numbers of the page are those of the JSON, beneath the first line of the text."""
    found.html(folder / "shown.html")
    found.json(folder / "saved.json")
    page, saved = (folder / "shown.html").read_text(), json.loads((folder / "saved.json").read_text())
    shown = values_in(page)
    return {key: shown[key] for key in saved} == saved and str(found).splitlines()[0] in html.unescape(page)
