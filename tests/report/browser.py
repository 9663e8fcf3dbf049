"""Headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1500,1300")


def find() -> str | None:
    """The path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


needs_browser = pytest.mark.skipif(
    find() is None, reason=f"no Chromium is installed (looked for {', '.join(NAMES)}; Debian's package is chromium)"
)


def run(page: Path, *options: str, profile: Path) -> str:
    """What the browser prints for `page`, with a fresh profile and without a network."""
    browser = find()
    assert browser is not None
    command = [
        browser,
        *FLAGS,
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def dom(page: Path, profile: Path) -> str:
    """The page's elements after its script has run."""
    return run(page, "--virtual-time-budget=3000", "--dump-dom", profile=profile)


def screenshot(page: Path, image: Path, profile: Path) -> None:
    """Write what the window shows as PNG."""
    run(page, "--virtual-time-budget=3000", f"--screenshot={image}", profile=profile)
