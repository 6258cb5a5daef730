"""A headless Chromium, and pages that fail a test if they complain or ask for anything.

These tests are run by `make test-browser`; the ordinary suite does not enter this folder.
"""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no Chromium: install the package chromium, or name it in CHROMIUM"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens a page of this text; all that it complains about fails the test."""
    contexts, complaints = [], []

    def open_page(text, *, scheme="light", width=1280, height=800, scripts=True, touch=False):
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(text, "utf-8")
        context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            java_script_enabled=scripts,
            has_touch=touch,
            is_mobile=touch,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda m: complaints.append(m.text))
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.on("dialog", lambda d: (complaints.append(d.message), d.dismiss()))
        page.on(
            "request", lambda r: r.url == file.as_uri() or complaints.append(f"asked for {r.url}")
        )
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
