"""The page: what its text promises, and what a browser makes of it.

The browser's part runs where $DUALENC_TEST_CHROMIUM names a Chromium and playwright is installed.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi.testclient import TestClient

from dualenc.serve.app import PAGE, Service, create_app
from tests.serve.conftest import MARKUP


def test_nothing_comes_from_elsewhere_and_nothing_from_data_is_markup(client: TestClient) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://|@import|url\(", PAGE)
    assert not re.search(r"<[^>]* (on\w+|style|src)=", PAGE), "refused by the policy"
    policy = client.get("/").headers["content-security-policy"]
    assert re.search(r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+';", policy)


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)


@pytest.mark.slow
def test_searching_by_keyboard_in_a_browser(url: str) -> None:
    path = os.environ.get("DUALENC_TEST_CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api")
    if path is None:
        pytest.skip("set DUALENC_TEST_CHROMIUM to the path of a Chromium")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    arguments = ["--no-sandbox", "--disable-gpu", "--single-process", "--no-zygote"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=arguments)
        page = chromium.new_context(viewport={"width": 360, "height": 740}).new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("#rerank-field:not([hidden])")
        page.keyboard.press("Tab")
        page.keyboard.type("fox dog")
        tabs = ["k", "where", "hybrid", "rerank"]
        reached = [(page.keyboard.press("Tab"), page.evaluate("document.activeElement.id"))[1] for _ in tabs]
        assert reached == tabs
        page.keyboard.press("Space")
        page.fill("#k", "20")
        page.press("#text", "Enter")
        page.wait_for_selector("#results li")
        assert page.locator("#results li").count() == 20
        assert MARKUP in page.locator("#results p").all_text_contents()
        assert page.locator("#results b, #results img").count() == 0
        page.fill("#where", "year>=2018")
        page.press("#where", "Enter")
        page.wait_for_selector("#results li:nth-child(2):last-child")
        page.get_by_role("button", name="More like d19").press("Enter")
        page.wait_for_selector("#results li:only-child")
        assert page.evaluate("document.activeElement.id") == "status"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than a phone"
        violations = axe.Axe().run(page).response["violations"]
        assert not [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in violations]
        assert not complaints
        chromium.close()
