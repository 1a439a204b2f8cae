"""The status page in Chromium: what it shows, its keyboard, its accessibility, and the screenshots in the docs.

The tests are skipped where there is no Chromium. With `KVPOOL_SCREENSHOTS=1` and `-k fits` they write
docs/images/status-*.png.
"""

import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from kvpool.client import Client, connect
from kvpool.client.session import Session
from support.lending import engine, lender_process
from support.paths import DOCS
from support.server import free_port, pool_config, running_server
from support.waiting import DEADLINE_SECONDS

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
HOSTILE = "<img src=x onerror=\"document.title='hostile'\">"
SCREENSHOTS = bool(os.environ.get("KVPOOL_SCREENSHOTS"))
NUM_CHARTED = 8
"""Samples in the charts of a screenshot."""
SERIOUS = {"serious", "critical"}
WIDTHS = (1280, 400)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]


class Work:
    """Sessions that admit, run and free requests with common prefixes, in a thread, until the end of the block."""

    def __init__(self, client: Client) -> None:
        self._random = random.Random(0)  # noqa: S311 - a workload
        self._sessions = [
            client.open_session("llama-70b", client_name="prefill-0"),
            client.open_session("llama-70b", client_name="decode-0"),
            client.open_session("qwen-7b", client_name="sglang-0" if SCREENSHOTS else HOSTILE),
        ]
        self._prefixes = [self._tokens(self._random.randrange(40, 600)) for _ in range(30)]
        self._running: dict[Session, list[Any]] = {session: [] for session in self._sessions}
        self._count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_SECONDS)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100_000) for _ in range(count)]

    def _run(self) -> None:
        while not self._is_over.wait(0.03):
            for session, running in self._running.items():
                self._count += 1
                tokens = self._random.choice(self._prefixes) + self._tokens(self._random.randrange(10, 300))
                request = session.request(f"r{self._count}", tokens)
                if session.admit(request) is None:
                    session.free(request)
                else:
                    running.append(request)
                if len(running) > 5:
                    session.free(running.pop(0))
                if self._count % 4:
                    session.mark_executed()


@pytest.fixture(name="url", scope="module")
def fixture_url() -> Iterator[str]:
    """A server at work: two pools of schedulers, and one whose lender an engine maps."""
    port = free_port()
    with (
        running_server(metrics={"address": f"127.0.0.1:{port}"}) as address,
        connect(address) as client,
        lender_process(address) as lender,
        engine(address, lender.address) as mapping,
    ):
        mapping("run", "r", list(range(60)))
        client.create_pool(pool_config("llama-70b", num_blocks=3001, num_host_blocks=6000))
        client.create_pool(pool_config("qwen-7b", num_blocks=3001))
        with Work(client):
            yield f"http://127.0.0.1:{port}/"


@pytest.fixture(name="browser", scope="module")
def fixture_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    folder = tmp_path_factory.mktemp("chromium")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder, executable_path=CHROMIUM, args=FLAGS, headless=True
        )
        context.set_default_timeout(1000 * DEADLINE_SECONDS)
        expect.set_options(timeout=1000 * DEADLINE_SECONDS)
        yield context
        context.close()


@contextmanager
def opened(browser: BrowserContext, url: str, width: int = 1280, scheme: Any = "light") -> Iterator[Page]:
    """The page when it shows the pools. Fails if it logged an error, or loaded something from elsewhere."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith(url) else None)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(url)
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator(".pool")).to_have_count(3)
    yield page
    page.close()
    assert errors == []


def test_the_page_shows_pools_sessions_lenders_and_events(browser: BrowserContext, url: str) -> None:
    with opened(browser, url) as page:
        expect(page.locator(".pool .name")).to_have_text(["llama-70b", "m", "qwen-7b"])
        expect(page.locator(".pool .state")).to_have_text(["ready"] * 3)
        pool = page.locator(".pool").first
        blocks = pool.locator(".figures div", has_text="Blocks").first
        expect(blocks.locator("dd")).to_have_text("3,000 ")
        expect(page.locator("[data-table=sessions] tbody tr", has_text="prefill-0")).to_have_count(1)
        expect(page.locator("[data-table=misses] tbody tr", has_text="evicted").first).to_be_visible()
        host = page.locator(".figures div", has_text="In host memory")
        expect(host.locator("small")).to_have_text(["of 6,000 blocks"])
        lender = page.locator("[data-table=ranks] tbody tr")
        expect(lender.locator("th")).to_have_text("0, lender")
        expect(page.locator("[data-table=events] tbody tr", has_text="pool created")).to_have_count(2)
        expect(page.locator(".of-cluster").first).to_be_hidden()


def test_figures_follow_the_server(browser: BrowserContext, url: str) -> None:
    with opened(browser, url) as page:
        steps = page.locator("[data-table=sessions] tbody tr", has_text="prefill-0").locator("td").nth(6)
        before = steps.inner_text()
        expect(steps).not_to_have_text(before)


def test_texts_of_clients_are_shown_and_not_run(browser: BrowserContext, url: str) -> None:
    with opened(browser, url) as page:
        expect(page.locator("[data-table=sessions] tbody")).to_contain_text(HOSTILE)
        page.check("input[value=session]")
        expect(page.locator(".legend").nth(2)).to_contain_text(HOSTILE)
        assert page.title() == "kvpool"
        assert page.locator("img:not([src='icon.svg'])").count() == 0


def test_the_map_can_be_read_with_the_keyboard(browser: BrowserContext, url: str) -> None:
    with opened(browser, url) as page:
        slider = page.locator(".map").first
        expect(slider).to_have_attribute("aria-valuemax", "334")  # of at most 341, as there are three pools
        slider.focus()
        for key, first in (("ArrowRight", "1"), ("ArrowRight", "10"), ("ArrowLeft", "1"), ("End", "2,998")):
            page.keyboard.press(key)
            expect(page.locator(".readout").first).to_contain_text(f"Blocks {first} to ")
        expect(slider).to_have_attribute("aria-valuetext", page.locator(".readout").first.inner_text())
        page.keyboard.press("Escape")
        expect(page.locator(".readout").first).to_contain_text("Point at a cell")


def colours(page: Page) -> set[str]:
    """The colours of the first map's pixels."""
    found: set[str] = set(
        page.evaluate(
            """() => { const canvas = document.querySelector("canvas");
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const found = new Set();
            for (let i = 0; i < data.length; i += 4)
              if (data[i + 3] === 255) found.add([...data.slice(i, i + 3)].join());
            return [...found]; }"""
        )
    )
    return found


def test_the_map_is_coloured_by_state_session_or_age_in_each_theme(browser: BrowserContext, url: str) -> None:
    with opened(browser, url) as page:
        expect(page.locator(".legend").first).to_contain_text("in use")
        light = colours(page)
        page.check("input[value=session]")
        expect(page.locator(".legend").first).to_contain_text("session 2, prefill-0")
        assert colours(page) != light
        page.check("input[value=age]")
        expect(page.locator(".legend").first).to_contain_text("oldest fifth")
        page.check("input[value=state]")
        for theme in ("light", "dark"):
            page.click("#theme")
            expect(page.locator("#theme")).to_have_text(f"Theme: {theme}")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        page.reload()
        expect(page.locator("#theme")).to_have_text("Theme: dark")
        expect(page.locator(".pool")).to_have_count(3)
        page.click("#theme")  # auto again, for other tests


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_accessible_and_fits(browser: BrowserContext, url: str, width: int, scheme: str) -> None:
    with opened(browser, url, width, scheme) as page:
        expect(page.locator("[data-table=sessions] tbody tr")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        too_wide = "figures => figures.filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
        assert page.locator(".figures div").evaluate_all(too_wide) == []
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS] == []
        if SCREENSHOTS:
            points = re.compile(rf"(\S+ ){{{NUM_CHARTED},}}")
            expect(page.locator(".chart.hits .line").first).to_have_attribute("points", points)
            page.screenshot(path=Path(DOCS, "images", f"status-{scheme}-{width}.png"), full_page=width > 1000)
