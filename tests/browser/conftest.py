"""A headless Chromium, and the pages that it is shown."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_runs import write_pictures, write_run

from cheem_jax.cli.report import Report, write_report_page

CHROMIUM = os.environ.get("CHEEM_CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Debian's Chromium, or the browser that CHEEM_CHROMIUM names."""
    from playwright.sync_api import sync_playwright

    if not Path(CHROMIUM).exists():
        reason = f"no {CHROMIUM}: install Chromium, or name it with CHEEM_CHROMIUM"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def one_run(tmp_path_factory) -> Path:
    """The page of one run, with images."""
    folder = tmp_path_factory.mktemp("one")
    names = ("one", "two", "three", "four")
    run = write_run(folder / "run", names=names, pictures=write_pictures(folder / "small", names))
    write_report_page(Report((run,)))
    return run / "report.html"


@pytest.fixture(scope="session")
def three_runs(tmp_path_factory) -> Path:
    """The page of two methods, one with two seeds; the name of a task contains markup."""
    folder = tmp_path_factory.mktemp("three")
    names = (
        "<img src=x onerror=alert(1)>",
        "two",
        "a task with a name that is longer than any column has room for",
    )
    write_run(folder / "a", names=names)
    write_run(folder / "b", names=names, seed=1, accuracy=0.9)
    write_run(folder / "c", names=names, method="ewc", accuracy=0.5)
    write_report_page(Report((folder,)))
    return folder / "report.html"


@pytest.fixture(
    params=[(1200, "light"), (390, "light"), (1200, "dark"), (390, "dark")],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def opened(request, browser) -> Iterator[Callable]:
    """Open a page at a width and in a theme; errors in the meantime fail the test."""
    width, theme = request.param
    with browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme
    ) as context:
        yield from _opened(context)


@pytest.fixture
def opened_wide(browser) -> Iterator[Callable]:
    with browser.new_context(
        viewport={"width": 1200, "height": 900}, color_scheme="light"
    ) as context:
        yield from _opened(context)


def _opened(context) -> Iterator[Callable]:
    page = context.new_page()
    wrong = []
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
        ),
    )

    def open_page(file: Path, place: str = ""):
        page.goto(file.as_uri() + place)
        return page

    yield open_page
    assert wrong == []
