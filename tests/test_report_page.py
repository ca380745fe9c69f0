"""The report in a real browser: plots that show something, no complaints, no horizontal scroll."""

import numpy as np
import pytest
from browser import find_chromium, num_colored, open_browser
from run_folders import PROFILE, learn_from, make_plan, trace_experts, write_run_folder
from test_run_report import make_record, write_run

from ds_hydra.report.page import render_runs, render_simulation, write_page
from ds_hydra.report.run_folder import load_run, predict_timeline

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: apt-get install chromium, or name one in the variable CHROMIUM",
)
SECTIONS = (
    "loss", "throughput", "strategies", "shares", "scatter", "errors", "gantt", "lengths", "memory", "slowest"
)  # fmt: skip
PLOTS = (
    "[...document.querySelectorAll('.canvas, .strip, .rows')].filter(e => e.getClientRects().length > 0)"
    ".map(e => [e, e.getBoundingClientRect()])"
    ".map(([e, r]) => [e.getAttribute('aria-label'), r.x + scrollX, r.y + scrollY, r.width, r.height])"
)
"""Name and box of every plot that is not hidden."""


@pytest.fixture(scope="module")
def page():
    with open_browser(CHROMIUM) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run, two runs, a run of one iteration without anything else, and a simulation."""
    folder = tmp_path_factory.mktemp("pages")
    full = load_run(write_run_folder(folder / "full"))
    other = load_run(write_run_folder(folder / "a-run-with-a-rather-long-name-of-a-folder", 4))
    learn_from(write_run_folder(folder / "learned"))
    trace_experts(folder / "learned", {"layers": [0, 2], "tokens": [[9, 0, 3], [4, 4, 4]]})
    bare = load_run(write_run(folder / "bare", [make_record(0, "2x<1,1>", (100.0, 90.0))]))
    timelines = [
        predict_timeline(make_plan(iteration), PROFILE, forward_fraction=1 / 3)
        for iteration in range(6)
    ]
    html = {
        "run": render_runs([full]),
        "compare": render_runs([full, other]),
        "learned": render_runs([load_run(folder / "learned")]),
        "bare": render_runs([bare]),
        "simulation": render_simulation(timelines, title="paper/case", subtitle="7B on 8 GPUs"),
    }
    for name, text in html.items():
        write_page(text, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in html}


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("run", 1280, False),
        ("run", 1280, True),
        ("run", 400, False),
        ("run", 400, True),
        ("compare", 1280, True),
        ("compare", 400, False),
        ("learned", 1280, True),
        ("learned", 400, False),
        ("bare", 1280, False),
        ("bare", 400, True),
        ("simulation", 1280, False),
        ("simulation", 400, True),
    ],
)
def test_the_page_is_whole_at_every_width_and_in_light_and_dark(page, pages, name, width, dark):
    page.open(pages[name], width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        "[...document.querySelectorAll('main *, header *')].filter(e => !e.closest('svg') && "
        f"e.getClientRects().length > 0 && e.getBoundingClientRect().right > {width} + 1)"
        ".map(e => e.outerHTML.slice(0, 99))"
    )
    assert outside == []
    picture = page.screenshot()
    assert picture.width == width
    ground = np.asarray(picture)[:8].mean()
    assert ground < 60 if dark else ground > 240
    plots = page.evaluate(PLOTS)
    assert len(plots) >= {"run": 10, "compare": 20, "learned": 12, "bare": 6, "simulation": 2}[name]
    for words, x, y, plot_width, plot_height in plots:
        plot = picture.crop((int(x), int(y), int(x + plot_width), int(y + plot_height)))
        assert num_colored(plot) >= 20, f"{words} shows nothing"
    assert page.complaints == []


def test_all_sections_are_there_with_their_panels(page, pages):
    page.open(pages["compare"], width=1280)
    assert page.evaluate("[...document.querySelectorAll('section')].map(s => s.id)") == list(
        SECTIONS
    )
    assert page.evaluate(
        "[...document.querySelectorAll('section')].map(s => s.querySelectorAll('figure').length)"
    ) == [2] * len(SECTIONS)
    left, right = page.evaluate(
        "[...document.querySelectorAll('#loss figure')].map(f => f.getBoundingClientRect().x)"
    )
    assert left < 640 < right
    page.resize(400, 900)
    assert (
        len(
            set(
                page.evaluate(
                    "[...document.querySelectorAll('#loss figure')].map(f => f.getBoundingClientRect().x)"
                )
            )
        )
        == 1
    )


def test_the_selector_shows_the_chosen_iteration(page, pages):
    page.open(pages["run"], width=1280)
    shown = "[...document.querySelectorAll('#gantt .choice')].map(c => !c.hidden)"
    count = page.evaluate(f"{shown}.length")
    assert count >= 4
    assert page.evaluate(shown) == [index == 0 for index in range(count)]
    before = np.asarray(page.screenshot("#gantt figure"))
    page.evaluate(
        "(() => { const s = document.querySelector('#gantt select'); s.value = '2';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert page.evaluate(shown) == [index == 2 for index in range(count)]
    after = np.asarray(page.screenshot("#gantt figure"))
    assert before.shape != after.shape or (before != after).any()
    assert "slowest" in page.evaluate("document.querySelector('#gantt option').textContent")


def test_pointing_at_a_block_says_what_it_is(page, pages):
    page.open(pages["run"], width=400)
    page.evaluate("document.querySelector('#gantt').scrollIntoView()")
    # The event of this scroll comes with the next frame, and scrolling hides the text.
    page.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
    )
    x, y = page.evaluate(
        "(() => { const r = [...document.querySelectorAll('#gantt .choice:not([hidden]) .fwd.block')].at(-1)"
        ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    assert page.evaluate("document.querySelector('#tip').hidden")
    page.point_at(x, y)
    assert page.evaluate("document.querySelector('#tip').textContent").startswith(
        "forward of micro-batch"
    )
    assert not page.evaluate("document.querySelector('#tip').hidden")
    box = page.evaluate(
        "(() => { const r = document.querySelector('#tip').getBoundingClientRect(); return [r.left, r.right]; })()"
    )
    assert box[0] >= 0
    assert box[1] <= 400
    page.point_at(2, 2)
    assert page.evaluate("document.querySelector('#tip').hidden")


def test_predicted_and_measured_share_their_axis(page, pages):
    page.open(pages["run"], width=1280)
    tracks = page.evaluate(
        "[...document.querySelectorAll('#gantt .choice:not([hidden]) .rows')].map(s => "
        "[...s.querySelectorAll('.fwd, .bwd')].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right]))"
    )
    assert len(tracks) == 2
    predicted, measured = tracks
    assert len(predicted) == len(measured)
    assert min(left for left, _ in predicted) == pytest.approx(
        min(left for left, _ in measured), abs=1
    )
    # Iteration 5, the slowest, took twice as long as planned.
    widths = [max(right for _, right in t) - min(left for left, _ in t) for t in tracks]
    assert widths[1] / widths[0] == pytest.approx(2.0, rel=0.02)


def test_what_the_checks_would_miss_is_not_missed(page, pages, tmp_path):
    """A page with an error, a foreign address, an empty plot and a wide element is caught."""
    mistakes = (
        'fetch("https://example.org/x").catch(() => 0); console.error("oh"); undefinedName();'
    )
    broken = pages["run"].read_text().replace('"use strict";', f'"use strict"; {mistakes}')
    write_page(broken + '<div style="width:2000px">wide</div>', tmp_path / "broken.html")
    page.open(tmp_path / "broken.html", width=1280)
    assert page.evaluate("document.documentElement.scrollWidth") == 2000 + 80
    said = " ".join(page.complaints)
    assert "oh" in said
    assert "undefinedName" in said
    assert "asked the network for https://example.org/x" in said
    page.complaints.clear()
    hide = "document.querySelector('#loss .line').remove()"
    page.open(pages["run"], width=1280)
    assert num_colored(page.screenshot("#loss .canvas")) > 500
    page.evaluate(hide)
    assert num_colored(page.screenshot("#loss .canvas")) == 0
