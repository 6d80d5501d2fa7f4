"""Pages as a browser draws them, where one is installed, and names that would harm one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needed = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed")
HOSTILE = "</script><script>document['title']='run'</script>"
IMAGE = "\"'><img src=x onerror=document['title']='run'>"


def drawn(folder: Path, page: str, script: str = "", width: int = 1280) -> str:
    """The page as the browser has drawn it in a window of this width, after a script of the test."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    command += ["--hide-scrollbars", f"--window-size={width},900"]
    return subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=120, check=True).stdout


def cells(dom: str, title: str) -> list[str]:
    """The texts of one column of a table."""
    found = re.findall(rf'<td[^>]* data-key="{title}"[^>]*>(.*?)</td>', dom)
    return [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]


def shown_in(page: str) -> dict:
    """What the script of a page draws: its title, lines and sections."""
    return json.loads(re.search(r'<script type="application/json" id="shown">(.*?)</script>', page, re.DOTALL)[1])


def columns_of(page: str) -> dict[str, list]:
    """The values in the table of a page, by column."""
    (table,) = (each for each in shown_in(page)["sections"] if each["kind"] == "table")
    return {title: [row[i] for row in table["rows"]] for i, (title, _) in enumerate(table["columns"])}


def hostile_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in (HOSTILE, IMAGE)))


def is_harmless(page: str) -> bool:
    """Whether no name became markup, and nothing is fetched from anywhere."""
    asks = re.search(r"http(?!-equiv)|//[a-z]+\.|<link|@import|url\(|innerHTML|document\.write|eval\(", page)
    return page.count("<script") == 2 and "<img" not in page and "default-src 'none'" in page and not asks
