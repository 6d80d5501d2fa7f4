"""Draw the page that a command of hmpx writes, light and dark, by a Chromium that is installed.

``python examples/picture_of_page.py --out light.png --dark dark.png -- doctor examples/flattens.py`` runs the command
with ``--html``, and takes a picture of the page's beginning.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = "chromium", "chromium-browser", "google-chrome"


def draw(page: Path, out: Path, size: str, dark: bool) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", scheme]
        command += [f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={out.resolve()}"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--dark", type=Path, metavar="PNG", help="the same picture, for a dark background")
    parser.add_argument("--size", default="1000,960", metavar="WIDTH,HEIGHT", help="of the window, default 1000,960")
    parser.add_argument("command", nargs="+", help="of python -m hmpx, and its script")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        words = [options.command[0], "--html", str(page), *options.command[1:]]
        subprocess.run([sys.executable, "-m", "hmpx", *words], stderr=subprocess.DEVNULL)  # doctor ends with 1
        draw(page, options.out, options.size, dark=False)
        if options.dark:
            draw(page, options.dark, options.size, dark=True)


if __name__ == "__main__":
    main()
