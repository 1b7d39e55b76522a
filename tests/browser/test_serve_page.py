"""The page of `cheem serve` in a browser, in front of a server that answers."""

import re
from collections.abc import Iterator

import pytest
from contrast import contrasts
from serving import Colours, Served, behind_a_proxy, picture, serving

from cheem_jax.serve import Limits

pytestmark = pytest.mark.browser

BRIGHT, DARK = (224, 32, 32), (96, 160, 224)


def expect(place):
    """Return Playwright's `expect`, imported here because other tests run without the package."""
    from playwright.sync_api import expect as wait_for

    return wait_for(place)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Colours(), Limits(max_body_mb=0.25), name="pets") as server:
        yield server


@pytest.fixture(
    params=[(1200, "light"), (390, "light"), (1200, "dark"), (390, "dark")],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def page(request, browser, served) -> Iterator:
    """The rendered page; errors in its console and requests to other hosts fail the test."""
    width, theme = request.param
    with browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme
    ) as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
        page = context.new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            # a refused image is logged by the browser itself
            lambda said: (
                wrong.append(said.text)
                if said.type in ("error", "warning") and "status of" not in said.text
                else None
            ),
        )
        page.on(
            "request",
            lambda sent: (
                None
                if sent.url.startswith((served.url, "data:", "blob:"))
                else wrong.append(sent.url)
            ),
        )
        page.on(
            "filechooser", lambda chooser: None
        )  # so that the browser hands over even the first one
        page.goto(served.url)
        page.locator("#tasks tr").nth(1).wait_for()
        yield page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert wrong == []


def choose(page, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    file = {"name": "a picture.png", "mimeType": "image/png", "buffer": picture(colour, size)}
    page.set_input_files("#file", files=[file])


def lit(page):
    return page.locator("#tasks tr.lit")


def test_a_chosen_image_is_shown_with_task_class_runners_up_and_the_blocks_that_ran(page):
    assert page.locator("#lead").inner_text().startswith("Predicts 64 classes of 2 tasks.")
    assert page.locator("#tasks tr").count() == 2 and lit(page).count() == 0
    choose(page, DARK)
    page.locator("#found").wait_for()
    assert page.locator("#task").inner_text() == "dark <b>red</b>"  # as text
    assert page.locator("#class").inner_text() == "96-160-224"
    assert page.locator("#guesses .value").all_inner_texts() == [
        "60.0 %",
        "30.0 %",
        "15.0 %",
        "7.5 %",
        "3.8 %",
    ]
    tracks = [box.bounding_box()["width"] for box in page.locator("#guesses .track").all()]
    page.wait_for_timeout(400)  # until the bars have grown
    fills = [box.bounding_box()["width"] for box in page.locator("#guesses .fill").all()]
    assert [fill / track for fill, track in zip(fills, tracks, strict=True)] == pytest.approx(
        [0.6, 0.3, 0.15, 0.075, 0.0375], abs=0.01
    )
    assert page.locator("#near .name").all_inner_texts() == ["dark <b>red</b>", "bright red"]
    assert lit(page).locator("th").inner_text() == "dark <b>red</b>"
    assert [re.sub(r"\s", "", text) for text in lit(page).locator("td").all_inner_texts()] == [
        "R0",
        "A1",
        "S",
        "N",
        "R2",
    ]
    assert (
        lit(page).locator(".cell").nth(1).get_attribute("title")
        == "block 2: adapted copy of expert 1"
    )
    page.wait_for_timeout(600)  # until all have lit up
    bright = lit(page).locator(".cell").first
    skipped = lit(page).locator(".cell.skip")
    shadow, ground = (
        f"cell => getComputedStyle(cell).{of}" for of in ("boxShadow", "backgroundColor")
    )
    dim = page.locator("#tasks tr:not(.lit) .cell").first
    assert bright.evaluate(shadow) != "none"
    assert skipped.evaluate(shadow) == dim.evaluate(shadow) == "none"
    assert dim.evaluate(ground) != bright.evaluate(ground)
    assert min(contrasts(page, "#tasks .cell, #tasks th")) >= 4.5
    assert skipped.evaluate("cell => getComputedStyle(cell).backgroundColor") == "rgba(0, 0, 0, 0)"
    assert bright.evaluate("cell => getComputedStyle(cell).backgroundColor") == "rgb(156, 206, 167)"
    assert (
        page.locator("#ran").inner_text()
        == "Blocks used for dark <b>red</b>: reuse of expert 0 in block 1; adapted copy of expert 1"
        " in block 2; branch skipped in block 3; new expert in block 4; reuse of expert 2 in"
        " block 5."
    )
    assert page.locator("#status").text_content() == "dark <b>red</b>: 96-160-224, 60.0 %"
    assert page.locator("#picture").is_visible()
    assert page.locator("#picture").evaluate("image => image.naturalWidth") == 8
    choose(page, BRIGHT)
    expect(page.locator("#class")).to_have_text("224-32-32")
    assert lit(page).locator("th").inner_text() == "bright red" and lit(page).count() == 1


def test_the_page_names_the_memory_and_several_images_are_listed_with_their_answers(page):
    expect(page.locator("#name")).to_have_text("Memory pets")
    assert page.title() == "pets · cheem serve"
    invitation = page.locator("#another")
    assert invitation.is_hidden()
    contents = {
        "a.png": picture(DARK),
        "b.txt": b"text",
        "c.png": picture((0, 0, 0)),
        "d.png": picture(BRIGHT),
    }
    page.set_input_files(
        "#file",
        files=[
            {"name": name, "mimeType": "image/png", "buffer": data}
            for name, data in contents.items()
        ],
    )
    expect(page.locator("#status")).to_have_text("4 images were classified")
    assert invitation.inner_text() == "Choose other images"
    said = page.locator("#list .said").all_inner_texts()
    assert [said[0], *said[2:]] == [
        "dark <b>red</b>: 96-160-224, 60.0 %",
        "None of my tasks",
        "bright red: 224-32-32, 60.0 %",
    ]
    assert said[1].startswith("The image: not an image file")
    assert page.locator("#class").inner_text() == "96-160-224"
    assert page.locator("#file-name").inner_text() == "a.png"
    page.locator("#list button").nth(3).click()
    assert page.locator("#class").inner_text() == "224-32-32"
    assert page.locator("#file-name").inner_text() == "d.png"
    assert page.locator("#list [aria-current]").all_inner_texts() == [
        "d.png\nbright red: 224-32-32, 60.0 %"
    ]
    page.locator("#list button").nth(1).click()
    assert page.locator("#found").is_hidden() and page.locator("#error").inner_text() == said[1]
    page.locator("#list button").nth(2).click()
    assert page.locator("#class").inner_text() == "None of my tasks"
    assert page.locator("#error").inner_text() == ""
    choose(page, BRIGHT)  # a new image replaces all
    expect(page.locator("#class")).to_have_text("224-32-32")
    assert page.locator("#list").is_hidden()


def test_the_networks_say_that_they_scroll_where_they_do(page):
    hint, box = page.locator(".sideways"), page.locator("#box")
    assert hint.is_visible() == box.evaluate("box => box.scrollWidth > box.clientWidth + 1")
    box.evaluate("box => { box.style.width = '12rem'; }")
    expect(hint).to_be_visible()


def test_below_a_path_of_a_proxy_the_page_asks_there(browser):
    with (
        serving(Colours(), public=("pets.example.org",)) as served,
        behind_a_proxy(served.port, "/pets") as port,
    ):
        with browser.new_page(base_url=f"http://localhost:{port}") as page:
            for place in ("/pets/", "/pets"):
                page.goto(place)
                page.locator("#tasks tr").nth(1).wait_for()
                choose(page, BRIGHT)
                expect(page.locator("#class")).to_have_text("224-32-32")


def test_a_image_of_no_task_is_reported(page):
    choose(page, (0, 0, 0))
    page.locator("#found").wait_for()
    assert page.locator("#class").inner_text() == "None of my tasks"
    assert page.locator("#nothing").inner_text().endswith("than 95 % of that task's own images.")
    assert page.locator("#guesses li").count() == 0
    assert page.locator("#near li").count() == 2 and lit(page).count() == 0
    assert page.locator("#ran").inner_text() == "No task network was used."


def test_a_file_without_an_answer_is_explained_in_a_sentence_and_the_next_image_is_answered(page):
    choose(page, BRIGHT)
    page.locator("#found").wait_for()
    page.set_input_files(
        "#file",
        files=[{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"once upon a time"}],
    )
    page.locator("#error:not(:empty)").wait_for()
    assert (
        page.locator("#error")
        .inner_text()
        .startswith("The image: not an image file of a known format (JPEG, ")
    )
    assert page.locator("#found").is_hidden()
    assert lit(page).count() == 0
    assert page.locator("#picture").is_hidden()
    page.set_input_files(
        "#file", files=[{"name": "a.png", "mimeType": "image/png", "buffer": bytes(2**19)}]
    )
    expect(page.locator("#error")).to_contain_text(
        "The file has 0.5 MiB; at most 0.25 MiB are accepted."
    )
    choose(page, (160, 32, 32), (10_000, 5_000))
    expect(page.locator("#error")).to_contain_text("10000 x 5000 pixels are too many")
    choose(page, DARK)
    page.locator("#found").wait_for()
    assert page.locator("#error").inner_text() == ""


def test_the_keyboard_opens_the_file_chooser_and_reaches_the_networks(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "choose"
    for key in ("Enter", "Space"):
        with page.expect_file_chooser(timeout=5000) as opened:
            page.keyboard.press(key)
        file = {"name": f"{key}.png", "mimeType": "image/png", "buffer": picture(BRIGHT)}
        opened.value.set_files([file])
        expect(page.locator("#file-name")).to_have_text(f"{key}.png")
        page.locator("#found").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "box"


def test_a_image_is_dropped_or_pasted(page):
    transfer = page.evaluate_handle(
        """bytes => { const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" })); return data; }""",  # noqa: E501
        list(picture(BRIGHT)),
    )
    page.dispatch_event("#choose", "dragover", {"dataTransfer": transfer})
    assert page.locator("body.over").count() == 1
    page.dispatch_event("#choose", "drop", {"dataTransfer": transfer})
    page.locator("#found").wait_for()
    assert page.locator("#file-name").inner_text() == "dropped.png"
    assert page.locator("body.over").count() == 0
    page.evaluate(
        """async bytes => navigator.clipboard.write([
        new ClipboardItem({ "image/png": new Blob([new Uint8Array(bytes)], { type: "image/png" }) })])""",  # noqa: E501
        list(picture(DARK)),
    )
    page.keyboard.press("Control+V")
    expect(page.locator("#class")).to_have_text("96-160-224")
