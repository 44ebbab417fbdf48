"""The page: what its text promises, and what a browser makes of it.

The browser's part runs where $DUALENC_TEST_CHROMIUM names a Chromium and playwright is installed.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from dualenc.data.sources import open_corpus
from dualenc.errors import DualencError
from dualenc.search.rerank import open_cross_encoder
from dualenc.search.searcher import Searcher
from dualenc.search.where import parse_conditions
from dualenc.serve.app import Settings, create_app
from dualenc.serve.metrics import Metrics
from dualenc.serve.service import Service
from tests.commands import toy
from tests.commands.in_process import run
from tests.serve.conftest import Serve

PAGE = resources.files("dualenc.serve").joinpath("page.html").read_text(encoding="utf-8")
TOKEN = "a-token-of-some-length"


class Elements(HTMLParser):
    """All elements with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_comes_from_elsewhere_and_nothing_from_data_is_markup() -> None:
    for _, attributes in Elements().found:
        for name, value in attributes.items():
            assert not name.startswith("on"), "handlers in attributes are refused by the policy"
            assert name != "style", "so are styles"
            assert name not in ("src", "href") or (value or "").startswith("data:,")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://|@import|url\(", PAGE)


def test_every_field_has_a_label_and_the_order_is_that_of_the_page() -> None:
    elements = Elements().found
    labelled = [attributes["for"] for tag, attributes in elements if tag == "label"]
    fields = [attributes["id"] for tag, attributes in elements if tag in ("input", "select")]
    assert labelled == fields
    assert all((attributes.get("tabindex") or "-1") == "-1" for _, attributes in elements)
    assert ("html", {"lang": "en"}) in elements
    assert any(tag == "meta" and "width=device-width" in (a.get("content") or "") for tag, a in elements)
    assert "prefers-color-scheme: dark" in PAGE
    assert "alt" in next(attributes for tag, attributes in elements if tag == "img")


def test_the_policy_allows_the_pages_own_script_alone(serve: Serve, text_index: Path) -> None:
    response = serve(text_index).get("/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["style-src"])


Live = Callable[..., str]


@pytest.fixture
def live() -> Iterator[Live]:
    """Starts a server over an index and gives its URL."""
    stop: list[Callable[[], None]] = []

    def start(folder: Path, images: Path | None = None, judge: Path | None = None, **app: Any) -> str:
        pictures = None if images is None else open_corpus(str(images), modality="image")
        rescore = None if judge is None else open_cross_encoder(str(judge))[0]
        service = Service(
            lambda before: Searcher.open(folder, before=before, judge=rescore), pictures=pictures, metrics=Metrics()
        )
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(service, Settings(watch=False, **app)), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.02)

        def end() -> None:
            server.should_exit = True
            thread.join(20)

        stop.append(end)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield start
    for end in stop:
        end()


@pytest.fixture
def browser() -> Iterator[Any]:
    path = os.environ.get("DUALENC_TEST_CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api")
    if path is None:
        pytest.skip("set DUALENC_TEST_CHROMIUM to the path of a Chromium")
    arguments = ["--no-sandbox", "--disable-gpu", "--single-process", "--no-zygote"]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


def opened(browser: Any, url: str, **how: Any) -> tuple[Any, list[str]]:
    """A page, and whatever it complains about."""
    page = browser.new_context(**how).new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append("dialog"), dialog.dismiss()))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(url)
    return page, wrong


def until(page: Any, holds: str) -> None:
    """Wait for an expression to hold; playwright's own way needs eval, which the policy of the page forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(holds):
        assert time.monotonic() < deadline, holds
        time.sleep(0.05)


@pytest.mark.slow
def test_searching_texts_in_a_browser(browser: Any, live: Live, engine_index: Path) -> None:
    page, wrong = opened(browser, live(engine_index), viewport={"width": 360, "height": 740})
    page.wait_for_selector("#about:not(:empty)")
    assert page.text_content("#about") == "30 items"
    page.keyboard.press("/")
    page.keyboard.type("fox dog")
    page.keyboard.press("Enter")
    page.wait_for_selector("#results li")
    assert page.locator("#results li").count() == 10
    assert set(page.locator("mark").all_text_contents()) <= {"fox", "dog"}
    assert re.match(r"10 results in [\d.]+ ms", page.text_content("#status"))
    # A snippet that is markup is shown as its text.
    page.fill("#k", "30")
    page.press("#text", "Enter")
    until(page, "document.querySelectorAll('#results li').length == 30")
    assert "<img src=x onerror=alert(1)> fox & <b>dog</b>" in page.locator("#results p").all_text_contents()
    assert page.locator("#results b, #results img").count() == 0
    # The engine's own filter, from the keyboard.
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    page.fill("#engine-filter", "year >= 2020")
    page.press("#engine-filter", "Enter")
    until(page, "document.querySelectorAll('#results li').length == 10")
    first = page.locator("#results h2").first.text_content().split(". ")[1]
    page.locator("#results button").first.click()
    until(page, f"document.getElementById('status').textContent.includes('like {first}')")
    assert page.evaluate("document.activeElement.id") == "status"
    assert first not in [text.split(". ")[1] for text in page.locator("#results h2").all_text_contents()]
    page.go_back()
    until(page, "!document.getElementById('status').textContent.includes('like')")
    until(page, "document.querySelectorAll('#results li').length == 10")
    assert page.input_value("#text") == "fox dog"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than a phone"
    assert not wrong


@pytest.mark.slow
def test_what_the_page_says_before_a_search_and_what_it_marks(browser: Any, live: Live, filtered_index: Path) -> None:
    page, wrong = opened(browser, live(filtered_index), viewport={"width": 360, "height": 740})
    page.wait_for_selector("#hint:not([hidden])")
    assert page.text_content("#hint h2") == "Nothing searched yet"
    shown = page.text_content("#hint-text")
    assert "Type a question or a few words and press Enter." in shown
    assert "Filters narrow the results." in shown
    assert "image" not in shown, "this index takes none"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("#text", "What is the fox and a dog of")
    page.press("#text", "Enter")
    page.wait_for_selector("#results li")
    assert not page.is_visible("#hint")
    assert page.locator("mark").count() > 0
    assert {text.lower() for text in page.locator("mark").all_text_contents()} <= {"fox", "dog"}
    # An empty page again, with its hint.
    page.go_back()
    page.wait_for_selector("#hint:not([hidden])")
    assert page.locator("#results li").count() == 0
    # Mistakes are told in the words of the page.
    page.goto(page.url + "?text=fox&where=yaer%3D1")
    until(page, "document.getElementById('status').classList.contains('wrong')")
    assert page.text_content("#status").startswith("condition: no column 'yaer'; there are ")
    assert [line for line in wrong if "400" not in line] == []


def test_errors_name_a_condition(serve: Serve, text_index: Path) -> None:
    words = PAGE[PAGE.index("const STOP_WORDS") :].split(").split", 1)[0]
    assert {"the", "of", "and"} <= set(re.findall(r"\w+", words))
    error = serve(text_index).get("/search", params={"text": "fox", "where": "year>1"}).json()["error"]["message"]
    assert error == "the index was built without --columns to filter by; leave conditions out"
    for word, told in (
        ("year>x", "column 'year' is compared with 'x'; give a whole number"),
        ("lang>a", "condition: 'lang>a' orders a column"),
        ("yaer=1", "condition: no column 'yaer'; there are"),
        ("year", "'year' is no condition"),
    ):
        with pytest.raises(DualencError, match=told) as caught:
            parse_conditions([word], {"year": "integer", "lang": "text"})
        assert "--" not in str(caught.value)


@pytest.fixture(scope="session")
def judged_index(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    """60 texts, which are kept and can be searched by words; the cross-encoder `judge` lies beside."""
    folder = tmp_path_factory.mktemp("judged")
    toy.save_documents(folder / "docs.jsonl", 60)
    run("index", text_model, folder / "docs.jsonl", "--out", folder / "index", "--texts", "--bm25")
    toy.cross_encoder(folder / "judge")
    return folder / "index"


def shown(page: Any) -> list[str]:
    """The ids on the page, best first."""
    return [text.split(". ")[1] for text in page.locator("#results h2").all_text_contents()]


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", ["", "rrf"])
def test_the_switches_of_hybrid_search_and_reranking(browser: Any, live: Live, judged_index: Path, hybrid: str) -> None:
    url = live(judged_index, judge=judged_index.parent / "judge", rerank_top=20)
    page, wrong = opened(browser, url, viewport={"width": 360, "height": 740})
    page.wait_for_selector("#rerank-field:not([hidden])")
    assert page.is_checked("#rerank"), "as the server does by default"
    switch = page.get_by_role("switch", name="Rerank")
    assert min(switch.bounding_box()[side] for side in ("width", "height")) >= 44, "a finger hits it"
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    page.get_by_label("By").select_option(hybrid)
    page.fill("#text", "fox hen")
    page.press("#text", "Enter")
    page.wait_for_selector("#results li")
    judged = shown(page)
    first = page.locator("#results li").first
    name = first.locator("h2").text_content().split()[-1]
    first.get_by_role("button", name="Whole text of").click()
    until(page, "!document.querySelector('#results li:first-child button[aria-label^=Whole]')")
    assert first.locator("p").text_content() == toy.texts(60)[int(name[1:])]
    # Off, and back, from the keyboard: from the field for the text along the page to the switch.
    page.locator("#text").focus()
    reached = [(page.keyboard.press("Tab"), page.evaluate("document.activeElement.id"))[1] for _ in range(3)]
    assert reached == ["k", "hybrid", "rerank"]
    page.keyboard.press("Space")
    assert not page.is_checked("#rerank")
    page.press("#text", "Enter")
    until(page, "location.search.includes('rerank=false')")
    until(page, "!document.getElementById('results').hasAttribute('aria-busy')")
    plain = shown(page)
    assert ["rerank" in body for body in sent] == [False, True]
    assert sent[1]["rerank"] is False
    assert [body.get("hybrid", "") for body in sent] == [hybrid, hybrid]
    asked = {"text": "fox hen", "k": 10} | ({"hybrid": hybrid} if hybrid else {})
    for found, more in ((judged, {}), (plain, {"rerank": False})):
        answer = page.request.post(url + "search", data=asked | more).json()
        assert found == [result["id"] for result in answer["results"]]
    assert judged != plain
    # A link says it, and the way back turns the switch on again.
    other, _ = opened(browser, page.url)
    other.wait_for_selector("#results li")
    assert (shown(other), other.is_checked("#rerank")) == (plain, False)
    page.go_back()
    until(page, "document.getElementById('rerank').checked")
    until(page, "!document.getElementById('results').hasAttribute('aria-busy')")
    assert shown(page) == judged
    # More than are reranked: the server says what to do about it.
    page.fill("#k", "21")
    page.press("#text", "Enter")
    until(page, "document.getElementById('status').textContent.includes('20 are reranked')")
    page.uncheck("#rerank")
    page.press("#text", "Enter")
    until(page, "document.querySelectorAll('#results li').length == 21")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than a phone"
    assert [line for line in wrong if "400" not in line] == []


@pytest.fixture(scope="module")
def filtered_index(engine_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts and columns of the engine in a FAISS index."""
    folder = tmp_path_factory.mktemp("filtered")
    run("index", engine_index.parent / "emb", "--out", folder / "index")
    return folder / "index"


def test_filters_of_an_index_in_a_browser(browser: Any, live: Live, filtered_index: Path) -> None:
    page, wrong = opened(browser, live(filtered_index) + "?text=fox")
    page.wait_for_selector("#results li")
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    assert not page.is_visible("#engine-filter")
    page.select_option("select[aria-label='how to compare year']", ">=")
    page.fill("#filter-year", "2024")
    page.press("#filter-year", "Enter")
    until(page, "document.querySelectorAll('#results li').length == 6")
    assert "where=year%3E%3D2024" in page.url
    assert not wrong


def test_what_a_server_lacks_has_no_switch(browser: Any, live: Live, text_index: Path) -> None:
    page, wrong = opened(browser, live(text_index) + "?text=fox&rerank=false")
    page.wait_for_selector("#results li")
    for name in ("rerank", "hybrid", "image", "filters"):
        assert not page.is_visible(f"#{name}"), name
    assert not wrong


@pytest.mark.slow
def test_searching_images_in_a_browser(browser: Any, live: Live, image_index: Path) -> None:
    page, wrong = opened(browser, live(image_index, image_index.parent / "pictures"), color_scheme="dark")
    page.wait_for_selector("#drop:not([hidden])")
    page.set_input_files("#image", image_index.parent / "pictures" / "05.png")
    page.wait_for_selector("#results li")
    assert page.locator("#results h2").first.text_content() == "1. 05.png"
    until(page, "[...document.querySelectorAll('#results img')].every((i) => i.naturalWidth == 40)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 22, 26)"
    assert not wrong


def test_the_token_is_asked_for(browser: Any, live: Live, text_index: Path) -> None:
    page, _ = opened(browser, live(text_index, token=TOKEN))
    page.wait_for_selector("#token-form:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#about:not(:empty)")
    page.fill("#text", "fox")
    page.press("#text", "Enter")
    page.wait_for_selector("#results li")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["filters", "engine", "switches"])
def test_accessibility_by_axe(
    browser: Any, live: Live, engine_index: Path, filtered_index: Path, judged_index: Path, scheme: str, kind: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    if kind == "filters":
        url = live(filtered_index) + "?text=fox&where=year%3E%3D2001"
    elif kind == "engine":
        url = live(engine_index) + "?text=fox&filter=year%3E%3D2001"
    else:
        url = live(judged_index, judge=judged_index.parent / "judge") + "?text=fox&hybrid=rrf"
    page, _ = opened(browser, url, color_scheme=scheme)
    page.wait_for_selector("#results li")
    assert page.is_visible("#rerank" if kind == "switches" else "#filters")
    found = axe.Axe().run(page).response["violations"]
    assert not [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]
