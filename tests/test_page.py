"""The live page as files, and in a real browser before a scripted engine and a real one."""

import os
import re
import time
from importlib.resources import files

import httpx
import pytest

from benchmarks.serving.process import serving as serving_model
from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from tests.browser import MISSING, browsing, busy
from tests.conftest import QUICKLY
from tests.folders import pair_flags
from tests.scripted_engine import ScriptedEngine, serving
from tests.watched import HOSTILE, report_of, watched_of

FOLDER = files("specjax.server") / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg"}
ENTER, LEFT, RIGHT, ESCAPE, TAB = "\ue007", "\ue012", "\ue014", "\ue00c", "\ue004"

needs_browser = pytest.mark.skipif(
    bool(MISSING),
    reason=f"no {' and no '.join(MISSING)}: Debian's packages chromium and chromium-driver",
)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED / "target")


@pytest.fixture
def engine(tokenizer):
    """An engine with two running requests."""
    watched = [watched_of(tokenizer, row) for row in range(2)]
    return ScriptedEngine(report=report_of, watched=lambda: watched)


@pytest.fixture
def server(engine, tokenizer):
    with serving(engine, tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def window():
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(window):
    """The browser as a reader of ordinary preferences has it, with an empty console."""
    window.resize(1280)
    window.prefer(color_scheme="light", reduced_motion="no-preference")
    window.open("about:blank")
    window.complaints()
    return window


@pytest.fixture
def page(browser, server):
    """The page, once it shows two requests; nothing may be wrong with it in the end."""
    browser.open(server.url)
    browser.until(lambda own: own.count(".card") == 2 and own.text("#status") == "Live.")
    yield browser
    assert browser.complaints() == []


def names():
    return sorted(each.name for each in FOLDER.iterdir())


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in names())])
def test_a_file_comes_with_its_type_and_a_policy(server, path):
    name = path.rpartition("/")[2] or "index.html"
    response = httpx.get(server.url + path)
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"].startswith(TYPES[os.path.splitext(name)[1]])
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["nothing.js", "..%2Fpage.py", "../page.py", "", "a/b", "x" * 999])
def test_no_other_file_is_given(server, path):
    assert httpx.get(f"{server.url}/page/{path}").status_code == 404


def test_the_page_needs_no_key_and_is_no_part_of_the_api(engine, tokenizer):
    with serving(engine, tokenizer, api_keys=("secret",)) as running:
        assert httpx.get(running.url).status_code == 200
        assert httpx.get(f"{running.url}/page/page.js").status_code == 200
        assert httpx.get(f"{running.url}/debug/requests").status_code == 401
        paths = httpx.get(f"{running.url}/openapi.json").json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/page")]


def test_files_name_nothing_but_each_other():
    texts = {name: (FOLDER / name).read_text() for name in names()}
    for name, text in texts.items():
        assert set(re.findall(r"https?:[^\"]*", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"(inner|outer)HTML|insertAdjacent|\.write\(|eval\(", text), name
    needed = re.findall(r"(?:src|href)=\"page/([^\"]+)\"", texts["index.html"])
    for text in texts.values():
        needed += re.findall(r"from \"\./([^\"]+)\"", text)
    assert {*needed, "index.html"} == set(texts)


def facts(browser):
    """The numbers at the top, by name."""
    return browser.run(
        "return Object.fromEntries([...document.querySelectorAll('#facts > div')].map(each => "
        "[each.children[0].innerText, [each.children[1].innerText, each.children[2].innerText]]))"
    )


@needs_browser
def test_the_top_says_what_runs_and_how_well(page):
    assert page.text("h1") == "specjax scripted"
    shown = facts(page)
    assert shown["setting"] == ["specexec:15", "realised goodput was below that of plain decoding"]
    assert shown["mode"][0] == "auto"
    assert shown["rows running"] == ["2", "1,234 steps so far"]
    assert shown["realised goodput"][1] == "90 % of predicted"
    assert shown["predicted goodput of plain decoding"][0] == "200"
    assert float(shown["gain over plain decoding"][0].removeprefix("× ")) == pytest.approx(
        1.5, abs=0.05
    )


@needs_browser
def test_a_text_is_shown_as_it_is_and_never_read_as_markup(page, tokenizer):
    for selector in (".text .prompt", ".text"):
        shown = page.run("return document.querySelector(arguments[0]).textContent", selector)
        assert shown == HOSTILE * (2 if selector == ".text" else 1)
    style = page.run(
        "const of = s => getComputedStyle(document.querySelector(s));"
        "const [one, other] = [of('.text .accepted'), of('.text .own')];"
        "return [of('.text').whiteSpace, one.textDecorationLine, other.textDecorationLine,"
        " one.color === other.color]"
    )
    assert style == ["pre-wrap", "underline", "none", False]
    assert page.count("main img, main script") == 0
    assert page.run("return window.hit === undefined")
    accepted = "return [...document.querySelectorAll('.card:first-child .accepted')].map("
    shown = page.run(f"{accepted}each => each.textContent).join('|')")
    ids = tokenizer(HOSTILE).input_ids
    assert shown.startswith(tokenizer.decode(ids[1:3]) + "|" + tokenizer.decode(ids[4:6]))


@needs_browser
def test_a_request_is_chosen_by_the_keyboard_and_stays_when_it_ends(page, engine, tokenizer):
    assert page.run("return document.querySelector('.card.chosen button').innerText") == (
        "Row 0 · req-0"
    )
    page.run("document.querySelectorAll('.choose')[1].focus()")
    page.press(ENTER)
    chosen = "return document.querySelector('[aria-pressed=true].choose').innerText"
    assert page.run(chosen) == "Row 1 · req-1"
    assert page.run("return document.activeElement.innerText") == "Row 1 · req-1"
    assert page.text("#tree-note").startswith("Row 1, specexec:3: 3 drafted tokens, 1 accepted")
    other = watched_of(tokenizer, 5, text="short")
    engine.watched = lambda: [other]
    page.until(lambda own: own.run(chosen) == "Row 1 · req-1 · ended")
    assert page.count(".card") == 2
    assert page.count("#tree svg") == 1
    page.click(".card:last-child")
    page.until(lambda own: own.run(chosen) == "Row 5 · req-5")
    assert page.count(".card") == 1
    assert page.run("return document.querySelector('.text').innerText") == "shortshort"
    engine.watched = list
    page.until(lambda own: own.text("#none") == "No request is running.")


@needs_browser
def test_the_tree_grows_by_levels_and_marks_what_was_accepted(page, engine, tokenizer):
    nodes = "return [...document.querySelectorAll('#tree .node')].map(each => each.textContent)"
    shown = page.run(nodes)
    assert [each.count("✓") for each in shown] == [0, 1, 0, 0]
    assert "⏎" in shown[2]
    assert page.run("return [...document.querySelectorAll('.chance')].map(e => e.innerHTML)") == [
        "0.75", "0.2", "0.38",
    ]  # fmt: skip
    assert page.count("#tree .edge") == 3
    assert page.count("#tree .edge.taken") == 1
    levels = "return [...document.querySelectorAll('.level')].map(each => getComputedStyle(each)."
    delays = [float(each[:-1]) for each in page.run(f"{levels}animationDelay)")]
    assert delays == sorted(delays)
    assert len(set(delays)) == 3
    assert page.run(f"{levels}animationName)") == ["grow"] * 3
    page.prefer(reduced_motion="reduce")
    assert page.run(f"{levels}animationName)") == ["none"] * 3
    engine.watched = lambda: [watched_of(tokenizer, 0, tree=())]
    page.until(lambda own: own.text("#tree-note") == "Row 0: the last step drafted nothing.")


@needs_browser
def test_the_chart_has_lines_and_lanes_and_says_what_is_at_its_cursor(page):
    assert page.count("#chart .line") == 3
    assert page.count("#chart rect.of-none") == 20
    assert page.count("#chart rect.of-tree") == 20
    assert page.run("return document.querySelector('.tip').hidden")
    page.point("#chart .of-none")
    assert "setting\nnone\n" in page.text(".tip")
    assert "tokens/s" in page.text(".tip")
    says = "return document.querySelector('.picker').getAttribute('aria-valuetext')"
    page.run("document.querySelector('.picker').focus()")
    page.press(ESCAPE)
    assert page.run("return document.querySelector('.tip').hidden")
    assert ": specexec:15, predicted 339 tokens/s, realised 305 tokens/s" in page.run(says)
    page.press(LEFT, LEFT, RIGHT, LEFT)
    assert ": specexec:15, predicted 338 tokens/s" in page.run(says)
    page.press("\ue011")  # Home
    assert ": none, predicted 300 tokens/s" in page.run(says)
    page.run("document.getElementById('window').value = '30'")
    page.until(lambda own: "−30 s" in own.text("#chart"))


@needs_browser
def test_tables_say_what_the_controller_believes(page):
    summaries = "return [...document.querySelectorAll('summary')].map(each => each.click())"
    page.run(summaries)
    shown = page.until(lambda own: own.count("#tables table") == 5 and own.text("#tables"))
    lines = [line.split("\t") for line in shown.splitlines()]
    assert ["chain:3", "2.5", "4 ms", "625 tokens/s"] in lines
    assert ["specexec:15", "2", "32", "5.1 ms", "0.8 µs", "5 ms", "9"] in lines
    assert ["specexec:15", "0", "7", "91 %", "50 %"] in lines
    assert ["0", "0.13", "0.75"] in lines
    assert ["guard", "on, for 12 steps"] in lines
    assert ["time lost to probing", "1.1 %"] in lines


@needs_browser
def test_an_engine_of_one_setting_is_shown_too(browser, tokenizer):
    with serving(ScriptedEngine(), tokenizer) as running:
        browser.open(running.url)
        browser.until(lambda own: own.text("#status") == "Live.")
        browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        browser.until(lambda own: own.text("#tables").count("Nothing yet.") == 4)
        assert facts(browser)["setting"] == ["–", "the only one"]
        assert facts(browser)["mode"] == ["the only one", "fixed"]
        assert "the only one" in browser.text("#chart")
    assert browser.complaints() == []


@needs_browser
def test_a_key_is_asked_for_and_borne(browser, engine, tokenizer):
    with serving(engine, tokenizer, api_keys=("ключ-2",)) as running:
        browser.open(running.url)
        browser.until(lambda own: own.text("#status") == "The server asks for an API key.")
        assert browser.run("return document.activeElement.id") == "key"
        browser.write("#key", "wrong" + ENTER)
        browser.until(lambda own: own.text("#status") == "The key was refused.")
        assert browser.count(".card") == 0
        browser.write("#key", "ключ-2" + ENTER)
        browser.until(lambda own: own.text("#status") == "Live." and own.count(".card") == 2)
        assert browser.run("return document.getElementById('login').hidden")
        kept = "return [location.href, document.cookie, localStorage.length, sessionStorage.length]"
        assert browser.run(kept) == [f"{running.url}/", "", 0, 0]
    assert all(" 401 " in each for each in browser.complaints())


@needs_browser
def test_a_server_that_fails_or_leaves_is_asked_ever_less_and_said_so(browser, engine, tokenizer):
    def fail():
        raise RuntimeError("scripted")

    with serving(engine, tokenizer) as running:
        browser.open(running.url)
        browser.until(lambda own: own.text("#status") == "Live.")
        engine.report = fail
        says = "The server failed: RuntimeError. Trying again in 2 s."
        browser.until(lambda own: own.text("#status") == says)
        assert browser.count(".card") == 2  # what was known last
        engine.report = report_of
        browser.until(lambda own: own.text("#status") == "Live.")
    says = "The server does not answer. Trying again in 5 s."
    browser.until(lambda own: own.text("#status") == says)


@needs_browser
def test_nothing_is_asked_while_paused_or_out_of_sight(page, engine):
    asked = []

    def counted():
        asked.append(1)
        return report_of()

    engine.report = counted
    page.until(lambda _: len(asked) > 1)
    page.click("#pause")
    page.until(lambda own: own.text("#status") == "Paused.")
    time.sleep(0.3)  # for the one that may be under way
    before = len(asked)
    time.sleep(1.2)
    assert len(asked) == before
    assert page.text("#status") == "Paused."
    page.click("#pause")
    page.until(lambda own: len(asked) > before and own.text("#status") == "Live.")
    with page.another_tab():
        time.sleep(0.3)
        before = len(asked)
        time.sleep(1.2)
        assert len(asked) == before
    page.until(lambda _: len(asked) > before)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(page, scheme):
    page.prefer(color_scheme=scheme)
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.point("#chart .of-none")
    page.until(lambda own: own.count("#tables td") > 10)
    ratios = page.contrasts()
    assert len(ratios) > 15
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


@needs_browser
@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_fits_its_width_and_every_control_shows_its_focus(page, width):
    page.resize(width)
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.until(lambda own: own.count("#tables td") > 10)
    assert page.run("return document.documentElement.scrollWidth") == width
    page.until(lambda own: own.run(
        "return Number(document.querySelector('#chart svg').getAttribute('width')) "
        "<= document.getElementById('chart').clientWidth"
    ))  # fmt: skip
    seen = set()
    for _ in range(25):
        page.press(TAB)
        name, outline = page.run(
            "const own = document.activeElement;"
            "return [own.id || own.className || own.tagName, getComputedStyle(own).outlineStyle]"
        )
        if name == "BODY":
            break
        assert outline == "solid", name
        seen.add(name)
    assert {"pause", "window", "picker", "choose", "text", "tree", "SUMMARY", "wide"} <= seen


@pytest.mark.slow
@needs_browser
def test_a_real_server_is_shown_as_it_works(browser):
    flags = ("--port", "0", "--rows", "2", "--settings", "none,chain:3,specexec:7")
    prompt, named = "def add(a, b):\n", pair_flags()[1]
    body = {"model": named, "prompt": prompt, "max_tokens": 200, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    bodies = [body, body | {"temperature": 0.9, "seed": 1}]
    with serving_model(*pair_flags(), *flags, environment=os.environ | QUICKLY) as (url, _):
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        browser.open(url)
        with busy(url, bodies):
            browser.until(lambda own: own.count(".card") == 2 and own.count("#chart rect") > 3, 60)
            browser.until(lambda own: own.count("#tree .node") > 3, 60)
            shown = browser.until(lambda own: _text_of(own, prompt, "temperature 0 ·"), 60)
            assert facts(browser)["mode"][0] == "auto"
        written = _ascii(whole["choices"][0]["text"])
        assert written.startswith(_ascii(shown))
        browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        browser.until(lambda own: own.count("#tables td") > 30)
    assert browser.complaints() == []


def _text_of(browser, prompt, fact):
    """The text so far of a request with some fact in its card, behind its prompt."""
    text = browser.run(
        "const own = [...document.querySelectorAll('.card')].find(each => each.innerText.includes("
        "arguments[0])); return own ? own.querySelector('.text').textContent : ''",
        fact,
    )
    return text.removeprefix(prompt) if len(text) > len(prompt) + 20 else ""


def _ascii(text):
    """A text without what may be cut between tokens."""
    return text.encode("ascii", "ignore").decode()
