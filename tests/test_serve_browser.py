"""The page of a server in a real browser: by keyboard, in both colour schemes, on a narrow screen, without a server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import truedraft
from browser import CHROMIUM, CONTROL, Browser
from served import Running, generated, paused, running, until
from truedraft.accelerated import Accelerated
from truedraft.loading import load
from truedraft.serve.keys import Keys

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
KEY = "a-key-of-sixteen"
PROMPT = 'def show(text):\n    return f"<script>{text}</script>"\n\n\ndef'
# least contrast of any visible text with its ground, by the formula of WCAG 2.2, and that text
CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const shown = [...document.body.querySelectorAll('*')].filter((e) => e.checkVisibility() && e.value !== undefined
    || [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const found = shown.filter((e) => e.checkVisibility()).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 100)];
  });
  return [found.length, ...found.sort((a, b) => a[0] - b[0])[0]];
})()"""
OVERFLOWING = """[...document.body.querySelectorAll('*')].filter((e) => e.checkVisibility()
  && e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest('.skip')).map((e) => e.outerHTML.slice(0, 100))"""
SHOW_ALL = """(() => {
  for (const id of ['error', 'lost']) document.getElementById(id).hidden = false;
  for (const id of ['error', 'lost-text']) document.getElementById(id).textContent = 'a sentence of some words';
  document.getElementById('live').classList.add('stale');
})()"""
FOCUSABLE = """[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((e) => e.checkVisibility() && !e.disabled)"""


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated) -> Iterator[Running]:
    with running(fast, allow_draft=("suffix",)) as started:
        yield started


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@contextlib.contextmanager
def opened(browser: Browser, server: Running, state: str = "ready") -> Iterator[Browser]:
    """The page of a server in a browser; afterwards the browser has left it, and no fault was noted."""
    browser.faults.clear()
    browser.size(1280, 900)
    browser.prefer()
    browser.open(f"{server.url}/")
    browser.wait(f"document.querySelector('#state').textContent === {json.dumps(state)}")
    if state == "ready":
        browser.wait("document.querySelector('select[name=draft]').value")
    try:
        yield browser
    finally:
        browser.open("about:blank")
    assert browser.faults == []


@pytest.fixture
def page(chromium: Browser, server: Running) -> Iterator[Browser]:
    with opened(chromium, server) as browser:
        yield browser


def fill(page: Browser, **fields: str) -> None:
    """Set fields of the request by name."""
    for name, value in fields.items():
        page.evaluate(f"document.querySelector('#request').elements.{name}.value = {json.dumps(value)}")


def text(page: Browser, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def status(page: Browser, beginning: str) -> str:
    """The text of the playground's status, once it begins so."""
    page.wait(f"document.querySelector('#status').textContent.startsWith({json.dumps(beginning)})")
    return text(page, "#status")


def answer_with(page: Browser, chunks: list[dict[str, Any]]) -> None:
    """Let the next request be answered with a stream of these chunks, and keep its body in `window.sent`."""
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.evaluate(f"""window.really = window.fetch; window.fetch = (path, options) => {{
      if (!path.startsWith('v1/')) return window.really(path, options);
      [window.sent, window.path, window.fetch] = [options.body, path, window.really];
      return Promise.resolve(new Response({json.dumps(events)}));
    }}""")


def chunk(tokens: list[tuple[str, bool]], added: str) -> dict[str, Any]:
    listed = [{"id": i, "text": each, "drafted": drafted} for i, (each, drafted) in enumerate(tokens)]
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": added, "tokens": listed}]}


def test_a_prompt_sent_by_keyboard_is_answered_with_its_drafts_marked(
    page: Browser, server: Running, fast: Accelerated
) -> None:
    page.tab_to("[name=prompt]")
    page.type(PROMPT)
    page.press("Enter", CONTROL)
    report = status(page, "Finished")
    (tokens,) = generated(fast, PROMPT, max_new_tokens=200, do_sample=False)
    assert text(page, "#answer") == fast.tokenizer.decode(tokens)  # type: ignore[union-attr]
    assert report.startswith(f"Finished: {len(tokens)} tokens in ")
    marked, own = (page.evaluate(f"document.querySelectorAll('#answer > {kind}').length") for kind in ("mark", "span"))
    assert marked == int(text(page, "#answer-drafted")) > 0
    assert own == len(tokens) - marked > 0
    assert float(text(page, "#answer-acceptance")) > 1
    assert text(page, "#answer-seed").isdigit()
    style = (
        "(({color, textDecorationLine: line}) => [color, line])(getComputedStyle(document.querySelector('#answer %s')))"
    )
    (marked_color, line), (own_color, none) = page.evaluate(style % "mark"), page.evaluate(style % "span")
    assert marked_color != own_color and (line, none) == ("underline", "none")
    page.wait(f"document.querySelector('#drafted').textContent.startsWith('{marked} of ')")


def test_escape_stops_an_answer_and_frees_its_row(page: Browser, server: Running) -> None:
    fill(page, prompt="x = 1\n" * 9, max_tokens="1900", draft="none")
    page.evaluate("document.querySelector('[name=prompt]').focus()")
    page.press("Enter", CONTROL)
    page.wait("document.querySelectorAll('#answer > *').length > 3")
    assert page.evaluate("document.querySelector('#send').disabled")
    page.press("Escape")
    count = int(status(page, "Stopped").split()[2])
    assert 3 < count < 1900 and count == int(text(page, "#answer-tokens"))
    until(lambda: not server.server.loop.running)
    page.wait("!document.querySelector('#no-requests').hidden")
    page.press("Enter", CONTROL)  # and another one may follow
    page.wait("!document.querySelector('#stop-button').disabled && document.querySelectorAll('#answer > *').length > 3")
    page.evaluate("document.querySelector('#stop-button').click()")
    status(page, "Stopped")


def test_rows_that_run_are_in_the_table(page: Browser) -> None:
    fill(page, prompt="x = 1\n" * 9, max_tokens="1900", draft="none")
    page.evaluate("document.querySelector('#send').click()")
    page.wait("document.querySelector('#requests tr td:nth-child(2)')?.textContent === 'running'")
    cells = page.evaluate("[...document.querySelector('#requests tr').cells].map((cell) => cell.textContent)")
    assert cells[0].startswith("cmpl-") and float(cells[4]) >= 1
    page.evaluate("document.querySelector('#stop-button').click()")
    page.wait("!document.querySelector('#requests tr')")


def test_text_is_never_markup(page: Browser) -> None:
    harm = "<img src=x onerror='window.harmed = 1'><script>window.harmed = 1</script>"
    before = page.evaluate("document.querySelectorAll('img, script').length")
    answer_with(page, [chunk([(harm, True), (harm, False)], harm * 2), {"id": harm, "choices": []}])
    fill(page, prompt=harm)
    page.evaluate("document.querySelector('#send').click()")
    status(page, "Finished")
    assert text(page, "#answer") == harm * 2
    fill(page, seed=harm)
    page.evaluate("document.querySelector('#send').click()")
    assert text(page, "#error") == f"seed={harm}: give a number"
    assert page.evaluate("document.querySelectorAll('img, script').length") == before
    assert page.evaluate("window.harmed") is None


@pytest.mark.parametrize(
    ("chunks", "parts"),
    [
        ([([("a", True), ("b", False)], "ab")], [["a", True], ["b", False]]),
        # a character of two tokens, complete in a later chunk
        ([([("x", True), ("\ufffd", True)], "x"), ([("\ufffd", True), ("y", False)], "éy")],
         [["x", True], ["é", True], ["y", False]]),
        ([([("\ufffd", True)], ""), ([("\ufffd", False)], "é")], [["é", False]]),
        # a space that the token alone does not have, and a special token without text in the answer
        ([([("one", False), ("two", True), ("</s>", False)], "one two")], [["one", False], [" two", True]]),
        # text held back for a stop string, which then is none
        ([([("a", True), ("EN", True)], "a"), ([("T", False)], "ENT")], [["a", True], ["EN", True], ["T", False]]),
        # and which then is one
        ([([("a", True), ("EN", True)], "a"), ([("D", True)], "")], [["a", True]]),
        ([([("", True), ("b", True)], "b")], [["b", True]]),
        ([([("abc", True)], "ab")], [["ab", True]]),
    ],
)  # fmt: skip
def test_an_answer_is_cut_at_its_tokens(page: Browser, chunks: list[Any], parts: list[Any]) -> None:
    answer_with(page, [chunk(*each) for each in chunks])
    page.evaluate("document.querySelector('#send').click()")
    status(page, "Finished")
    found = page.evaluate(
        "[...document.querySelector('#answer').children].map((e) => [e.textContent, e.matches('mark')])"
    )
    assert found == parts


def test_the_body_of_a_request_has_what_the_form_has(page: Browser) -> None:
    page.evaluate("document.querySelector('#more').open = true")
    for _ in range(3):
        page.evaluate("document.querySelector('#add-reference').click()")
    page.evaluate("""[...document.querySelectorAll('#references fieldset')].forEach((entry, i) => {
      entry.querySelector('.kind').selectedIndex = i;
      entry.querySelector('.content').value = ['a text', ' name ', 'cmpl-7'][i];
    })""")
    fill(
        page, prompt="x", top_p="0.5", seed="18446744073709551615", stop="end\\n\n\n##", prediction="p", draft="suffix"
    )
    answer_with(page, [])
    page.evaluate("document.querySelector('#send').click()")
    status(page, "Finished")
    references = [
        {"type": "text", "text": "a text"},
        {"type": "file", "name": "name"},
        {"type": "response", "id": "cmpl-7"},
    ]
    body = {
        "stream": True, "return_tokens": True, "model": "nano", "prompt": "x", "max_tokens": 200, "temperature": 0,
        "top_p": 0.5, "draft": "suffix", "prediction": {"type": "content", "content": "p"}, "stop": ["end\n", "##"],
        "references": references, "seed": 2**64 - 1,
    }  # fmt: skip
    assert page.evaluate("window.path") == "v1/completions"
    assert json.loads(page.evaluate("window.sent")) == body


def test_an_answer_is_copied_faster_as_its_own_prediction_in_a_chat(page: Browser) -> None:
    page.evaluate("document.querySelector('[value=chat]').click()")
    assert not page.evaluate("document.querySelector('[name=prompt]').checkVisibility()")
    page.evaluate("document.querySelector('#messages .content').value = 'class A:'")
    page.evaluate("document.querySelector('#send').click()")
    first = status(page, "Finished")
    answer = text(page, "#answer")
    page.evaluate("document.querySelector('#as-prediction').click()")
    page.evaluate("document.querySelector('#send').click()")
    page.wait(f"document.querySelector('#status').textContent.startsWith('Finished') && "
              f"document.querySelector('#status').textContent !== {json.dumps(first)}")  # fmt: skip
    assert text(page, "#answer") == answer
    assert float(text(page, "#answer-acceptance")) > 5
    page.evaluate("document.querySelector('#as-message').click()")
    roles = page.evaluate("[...document.querySelectorAll('#messages .role')].map((role) => role.value)")
    assert roles == ["user", "assistant", "user"]
    assert page.evaluate("document.querySelectorAll('#messages .content')[1].value") == answer


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def chosen(page: Browser) -> str:
    assert page.evaluate("document.querySelector('[name=prompt]').checkVisibility()") != page.evaluate(
        "document.querySelector('#messages .content').checkVisibility()"
    )
    return page.evaluate("document.querySelector('#request').elements.endpoint.value")


def test_the_playground_opens_on_chat_where_there_is_a_chat_template(
    chromium: Browser, fast: Accelerated, page: Browser, tmp_path: Path
) -> None:
    assert chosen(page) == "completions"  # of nano
    (tmp_path / "template").write_text(CHATML)
    with running(fast, chat_template=str(tmp_path / "template")) as server, opened(chromium, server) as other:
        assert chosen(other) == "chat"
        other.evaluate("document.querySelector('[value=completions]').click()")
        other.evaluate("document.querySelector('#key-form').requestSubmit()")  # the model is read again
        other.wait("document.querySelector('#state').textContent === 'ready'")
        assert chosen(other) == "completions"  # as the user chose


def test_reasoning_is_shown_before_the_answer_and_is_no_part_of_it(page: Browser) -> None:
    page.evaluate("document.querySelector('[value=chat]').click()")
    deltas = [{"reasoning_content": "Hm"}, {"content": "Yes"}, {"content": "."}]
    answer_with(page, [{"id": "c", "choices": [{"index": 0, "delta": each, "tokens": []}]} for each in deltas])
    page.evaluate("document.querySelector('#send').click()")
    status(page, "Finished")
    assert text(page, "#answer") == "Hm\n\nYes."
    page.evaluate("document.querySelector('#as-message').click()")
    assert page.evaluate("document.querySelectorAll('#messages .content')[1].value") == "Yes."


def test_errors_of_the_server_are_shown_at_their_field(page: Browser) -> None:
    fill(page, prompt="x", top_p="3")
    page.evaluate("document.querySelector('#send').click()")
    page.wait("!document.querySelector('#error').hidden")
    assert text(page, "#error").startswith("top_p=3")
    marked = "[...document.querySelectorAll('[aria-invalid]')].map((field) => field.name)"
    assert page.evaluate(marked) == ["top_p"]
    fill(page, top_p="")
    page.evaluate("document.querySelector('#send').click()")
    status(page, "Finished")
    assert page.evaluate(marked) == [] and page.evaluate("document.querySelector('#error').hidden")
    (fault,) = page.faults
    assert "400" in fault
    page.faults.clear()


def test_everything_is_reached_by_tab_and_shows_its_focus(page: Browser) -> None:
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.evaluate("document.querySelector('#add-reference').click(); document.activeElement.blur()")
    count = page.evaluate(f"(window.open_ = {FOCUSABLE}).length")
    reached = {}
    for _ in range(count + 2):
        page.press("Tab")
        place, outline = page.evaluate(
            "[open_.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineWidth]"
        )
        reached[place] = outline
    radio = page.evaluate("open_.findIndex((each) => each.matches('[type=radio]:not(:checked)'))")  # by the arrow keys
    assert reached.keys() - {-1} == {*range(count)} - {radio}
    assert {outline for place, outline in reached.items() if place >= 0} == {"3px"}
    unlabelled = "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).length"
    assert page.evaluate(unlabelled) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_all_text_can_be_read_and_nothing_is_wider_than_the_screen(
    page: Browser, server: Running, scheme: str, width: int
) -> None:
    page.size(width, 640)
    page.prefer(prefers_color_scheme=scheme)
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.evaluate("document.querySelector('#add-reference').click()")
    fill(page, prompt="x = 1\n" * 20 + "w" * 100, max_tokens="1500")
    page.evaluate("document.querySelector('#send').click()")
    page.wait("document.querySelectorAll('#answer > mark').length > 3")
    with paused(server):
        page.wait("document.querySelectorAll('#requests tr').length")
        page.evaluate(SHOW_ALL)
        shown, contrast, worst = page.evaluate(CONTRAST)
        assert shown > 50 and contrast >= 4.5, worst
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 64) == (scheme == "dark")
    page.evaluate("document.querySelector('#stop-button').click()")
    status(page, "Stopped")


def test_nothing_moves_where_less_motion_is_preferred(page: Browser) -> None:
    blinking = "getComputedStyle(document.querySelector('#answer'), '::after').animationName"
    page.evaluate("document.querySelector('#answer').classList.add('running')")
    assert page.evaluate(blinking) == "blink"
    page.prefer(prefers_reduced_motion="reduce")
    assert page.evaluate(blinking) == "none"


def test_it_reads_on_when_the_server_is_back(page: Browser, server: Running) -> None:
    state = "document.querySelector('#state').textContent === "
    page.evaluate("window.really = window.fetch; window.fetch = () => Promise.reject(new TypeError('no network'))")
    server.server.draining = True
    try:
        page.wait(f"{state}'not answering'")
        assert text(page, "#lost-text") == "The server does not answer."
        assert page.evaluate("document.querySelector('#live').matches('.stale')")
        page.wait("document.querySelector('#countdown').textContent === 'Next try in 4 s.'")  # later and later
        page.evaluate("window.fetch = window.really; document.querySelector('#retry').click()")
        page.wait(f"{state}'ending'")
    finally:
        server.server.draining = False
    page.evaluate("document.querySelector('#retry').click()")
    page.wait(f"{state}'ready'")
    assert page.evaluate("document.querySelector('#lost').hidden && !document.querySelector('.stale')")
    assert page.faults and all("503" in fault for fault in page.faults)
    page.faults.clear()


def test_a_page_that_is_left_reads_no_more(page: Browser, server: Running) -> None:
    watchers = server.app.state.feed.watchers
    for _ in range(8):  # browsers have six connections to a server
        page.open("about:blank")
        page.open(f"{server.url}/")
        page.wait("document.querySelector('select[name=draft]').value")
    until(lambda: watchers[""] == 1)
    page.open("about:blank")
    until(lambda: watchers[""] == 0)


def test_a_key_is_asked_for_and_kept_only_on_request(chromium: Browser, fast: Accelerated) -> None:
    with running(fast, Keys({KEY: "mine"})) as keyed, opened(chromium, keyed, "needs a key") as page:
        for keep in (False, True):
            page.wait("document.querySelector('#key').checkVisibility()")
            page.evaluate(f"document.querySelector('#keep-key').checked = {json.dumps(keep)}")
            page.evaluate("document.querySelector('#key').focus()")
            page.type(KEY)
            page.press("Enter")
            page.wait("document.querySelector('#state').textContent === 'ready'")
            page.wait("document.querySelector('select[name=draft]').value === 'auto'")
            fill(page, prompt="x", max_tokens="3")
            page.evaluate("document.querySelector('#send').click()")
            status(page, "Finished: 3 tokens")
            kept = page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
            assert kept == [int(keep), 0, ""]
            page.call("Page.reload")
            page.wait("document.readyState === 'complete' && document.querySelector('#answer').matches(':empty')")
        page.wait("document.querySelector('#state').textContent === 'ready'")
        assert all("401" in fault for fault in page.faults)
        page.faults.clear()
