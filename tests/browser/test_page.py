"""The HTML page in a browser: rendered without errors or network, at both widths and in both
themes."""

import re

import pytest
from contrast import contrasts
from page_runs import write_run

from cheem_jax.cli.report import Report, write_report_page

pytestmark = pytest.mark.browser

UNDRAWN = (
    "[...document.querySelectorAll('.plot')].filter(p => p.offsetParent &&"
    " !p.querySelector('.main-svg')).length"
)
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def read_to_the_end(page) -> None:
    """Scroll as a reader would, so that every chart becomes visible."""
    place, end = 0, 1
    while place < end:
        page.evaluate(f"window.scrollTo({{top: {place}, behavior: 'instant'}})")
        page.wait_for_timeout(60)
        place = place + 700
        end = page.evaluate("document.documentElement.scrollHeight")
    page.wait_for_function(f"{UNDRAWN} === 0")


def cell(page, row: int, block: int):
    """Return a cell of the architecture grid; row 0 is the base."""
    return page.locator(".architectures tbody tr:visible").nth(row).locator("td").nth(block)


@pytest.mark.parametrize("which", ["one_run", "three_runs"])
def test_every_chart_is_rendered_and_nothing_is_wider_than_the_page(which, opened, request):
    page = opened(request.getfixturevalue(which))
    read_to_the_end(page)
    assert page.locator(".plot:visible .main-svg").count() >= 9
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_charts_and_images_are_rendered_without_scrolling(one_run, opened):
    page = opened(one_run)
    page.wait_for_function(
        f"{UNDRAWN} === 0 && [...document.images].every(image => image.naturalWidth)"
    )
    assert page.evaluate("scrollY") == 0


def test_text_that_is_cut_off_fades_at_its_edge(one_run, opened):
    page = opened(one_run)
    page.wait_for_function(f"{UNDRAWN} === 0")
    page.locator("summary").click()
    wide = "[...document.querySelectorAll('.box')].filter(b => b.scrollWidth > b.clientWidth + 1)"
    page.wait_for_function(f"document.querySelectorAll('.box.cut').length === {wide}.length")
    if page.viewport_size["width"] == 390:
        box = page.locator(".box.cut").first.element_handle()
        box.evaluate("box => box.scrollTo(box.scrollWidth, 0)")
        page.wait_for_function("box => !box.classList.contains('cut')", arg=box)


def test_twelve_blocks_fit_or_are_said_to_scroll_and_dimmed_cells_stay_legible(opened, tmp_path):
    names = ("one", "a task with a name that is long")
    run = write_run(tmp_path / "run", names=names, blocks=12)
    write_report_page(Report((run,)))
    page = opened(run / "report.html")
    box, hint = page.locator(".architectures .box"), page.locator(".architectures .sideways")
    is_wide = page.viewport_size["width"] == 1200
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth + 1") == is_wide
    assert hint.is_visible() != is_wide
    cell(page, 1, 0).scroll_into_view_if_needed()
    cell(page, 1, 0).hover()
    page.wait_for_timeout(400)  # until the others have stepped back
    assert page.locator(".asking").count() == 1
    assert min(contrasts(page, ".architectures td > span")) >= 4.5


@pytest.mark.parametrize("which", ["one_run", "three_runs"])
def test_a_printed_page_cuts_nothing(which, opened, request):
    page = opened(request.getfixturevalue(which))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="light")
    page.wait_for_function(f"{UNDRAWN} === 0")
    right = "getBoundingClientRect().right"
    boxes = "[...document.querySelectorAll('.box, .box > *')].filter(one => one.offsetParent)"
    beyond = page.evaluate(
        f"{boxes}.map(one => one.{right} - document.querySelector('main').{right})"
    )
    assert max(beyond) < 1 and page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.evaluate("document.documentElement.className")


def test_a_cell_tells_its_experts_history_and_who_shares_it(one_run, opened):
    page = opened(one_run)
    tip = page.locator("#tip")
    cell(page, 3, 0).scroll_into_view_if_needed()
    cell(page, 3, 0).hover()
    assert tip.locator("b").inner_text() == "T3 three, block 1: adapt"
    assert tip.locator("li").all_inner_texts() == [
        "expert 3 of T3 three: low-rank Δ on expert 2",
        "expert 2 of T2 two: low-rank Δ on expert 1",
        "expert 1 of T1 one: low-rank Δ on expert 0",
        "expert 0 of the backbone: pretrained, full",
    ]
    assert tip.locator("p").inner_text() == "No other task shares it"
    assert page.locator("td.same").count() == 1 and page.locator("td.kin").count() == 3
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
    page.mouse.move(1, 1)
    assert tip.is_hidden() and page.locator(".asking").count() == 0


def test_the_grid_can_be_asked_with_the_keyboard(one_run, opened_wide):
    page = opened_wide(one_run)
    cell(page, 0, 0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "T1 one, block 2: new"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_moving_the_focus_past_the_edge_of_the_window_keeps_the_tip(one_run, opened_wide):
    page = opened_wide(one_run)
    page.set_viewport_size({"width": 1200, "height": 240})
    cell(page, 0, 0).focus()
    before = page.evaluate("scrollY")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
        page.wait_for_timeout(400)  # until the page has scrolled
    assert page.evaluate("scrollY") > before
    assert page.locator("#tip b").inner_text() == "T4 four, block 1: adapt"
    assert page.locator("#tip").is_visible()
    page.mouse.wheel(0, 3000)
    page.locator("#tip").wait_for(state="hidden")  # its cell is out of sight


def test_scrolling_the_box_of_the_table_hides_the_tip(one_run, opened_wide):
    page = opened_wide(one_run)
    box = page.locator(".architectures .box")
    box.evaluate("box => { box.style.maxHeight = '6rem'; }")
    cell(page, 1, 0).scroll_into_view_if_needed()
    # the event of this scrolling arrives with the next frame, and it would hide the tip
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    cell(page, 1, 0).dispatch_event(
        "pointerover"
    )  # as a finger does, which no later movement follows
    page.locator("#tip").wait_for()
    box.evaluate("box => { box.scrollTop += 30; }")
    page.locator("#tip").wait_for(state="hidden")


def test_an_address_that_is_no_text_stops_nothing(one_run, opened_wide):
    page = opened_wide(one_run, "#%")
    cell(page, 1, 0).scroll_into_view_if_needed()
    cell(page, 1, 0).hover()
    assert page.locator("#tip b").inner_text() == "T1 one, block 1: adapt"


def test_runs_are_switched_by_choice_and_by_address(three_runs, opened_wide):
    page = opened_wide(three_runs)
    visible = page.locator("article:visible")
    assert visible.count() == 1 and visible.locator(".title").inner_text() == "CHEEM, seed 0"
    page.select_option("#runs", "run-3")
    page.wait_for_url(re.compile("#run-3$"))
    assert visible.locator(".title").inner_text() == "EWC, seed 0"
    assert visible.locator(".architectures").count() == 0
    page.go_back()
    page.wait_for_function("document.querySelector('#runs').value === 'run-1'")
    page.locator(".comparison td a, .comparison th a", has_text="EWC").click()
    page.wait_for_function("document.querySelector('#runs').value === 'run-3'")
    opened_wide(three_runs, "#run-2-routing")
    page.reload()
    assert page.locator("article:visible .title").inner_text() == "CHEEM, seed 1"


def test_the_theme_can_be_changed_and_charts_follow(one_run, opened_wide):
    page = opened_wide(one_run)
    page.locator(".chart").first.scroll_into_view_if_needed()
    page.wait_for_selector(".chart .main-svg")
    ticks = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    before = page.evaluate(f"[{BACKGROUND}, {ticks}]")
    page.locator("#theme").click()
    page.wait_for_function(f"{ticks} !== {before[1]!r}")
    after = page.evaluate(f"[{BACKGROUND}, {ticks}]")
    assert after[0] != before[0] and after[1] != before[1]
    page.emulate_media(color_scheme="dark")  # the choice stays
    assert page.evaluate(BACKGROUND) == after[0]


def test_a_selector_shows_another_task(one_run, opened_wide):
    page = opened_wide(one_run)
    figure = page.locator("section[id$=similarity] .chart")
    figure.scroll_into_view_if_needed()
    figure.locator(".ytick text").first.wait_for()
    assert figure.locator(".ytick").count() == 4  # of the last task: the base and three tasks
    figure.locator("select").select_option("T1 one")
    page.wait_for_function(
        "document.querySelectorAll('section[id$=similarity] .ytick').length === 1"
    )


def test_markup_in_a_name_is_shown_as_text(three_runs, opened_wide):
    page = opened_wide(three_runs)
    read_to_the_end(page)
    assert page.locator("article:visible img").count() == 0
    assert (
        "<img src=x" in page.locator("article:visible section[id$=forgetting] .plot").inner_text()
    )
