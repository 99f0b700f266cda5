"""A real browser for pages: one way to start it, and one mark for tests that need it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")

in_browser = pytest.mark.skipif(
    # A program of the system, which no package of the project can bring; CI installs it.
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver (apt-get install chromium chromium-driver)",
)


@contextmanager
def started_browser() -> Iterator[Any]:
    """Chromium without a window, 1280 wide; its console and its requests are logged."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_window_size(1280, 900)
    try:
        yield driver
    finally:
        driver.quit()
