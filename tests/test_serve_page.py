"""The page of a server: its files, the feed of snapshots, and both in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import truedraft
from served import Running, paused, running, until
from truedraft.accelerated import Accelerated
from truedraft.loading import load
from truedraft.serve import live
from truedraft.serve.config import ServeConfig
from truedraft.serve.keys import Keys

KEYS = {"a-key-of-sixteen": "first", "b-key-of-sixteen": "second"}
LONG = {"prompt": "import os\n\n\ndef", "max_tokens": 1900, "temperature": 1, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated) -> Iterator[Running]:
    with running(fast, allow_draft=("suffix",)) as started:
        yield started


@pytest.fixture(scope="module")
def keyed(fast: Accelerated) -> Iterator[Running]:
    with running(fast, Keys(KEYS)) as started:
        yield started


@contextlib.contextmanager
def feed_of(server: Running, key: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """The snapshots of a server, while it is watched."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{server.url}/live", headers=headers, timeout=20) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = filter(None, response.iter_lines())
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def in_background(server: Running, body: dict[str, Any], key: str = "") -> threading.Thread:
    def post() -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text

    thread = threading.Thread(target=post)
    thread.start()
    return thread


# ---------------------------------------------------------------- files


class Page(HTMLParser):
    """Collects what a policy without inline scripts and styles forbids, and the addresses that a page loads."""

    def __init__(self, text: str):
        super().__init__()
        self.inline: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.addresses += [v for k, v in given.items() if k in ("src", "href") and v and not v.startswith("#")]


def test_files_are_served_whole_and_load_nothing_from_elsewhere(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        index = client.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self'" in index.headers["content-security-policy"]
        page = Page(index.text)
        assert page.inline == []
        served = {"/": index.text}
        for path in page.addresses:
            assert client.get(f"/{path}").status_code == 200, path
        for file in live.FILES.iterdir():
            path = live.ROUTES.get(file.name, f"/page/{file.name}")
            response = client.get(path)
            assert response.content == file.read_bytes()
            served[path] = response.text
            for module in re.findall(r'from "\./(.*)"', response.text):
                assert client.get(f"/page/{module}").headers["content-type"] == "text/javascript; charset=utf-8"
        for path, text in served.items():
            assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == [], path
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
        assert {"/page/app.js", "/page/style.css", "/favicon.ico"} < served.keys()


def test_browsers_ask_again_and_load_only_what_changed(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        for path in ("/", "/page/style.css", "/favicon.ico"):
            first, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(first.content))
            for tag in (first.headers["etag"], f"W/{first.headers['etag']}", f'"other", {first.headers["etag"]}', "*"):
                known = client.get(path, headers={"If-None-Match": tag})
                assert (known.status_code, known.content) == (304, b"")
                assert known.headers["etag"] == first.headers["etag"]
            assert client.get(path, headers={"If-None-Match": '"other"'}).content == first.content
            assert first.headers["cache-control"] == "no-cache"
        assert client.get("/page/index.html").status_code == 404
        assert client.get("/page/..%2Flive.py").status_code == 404
        assert client.post("/").status_code == 405


def test_a_server_may_have_no_page(fast: Accelerated) -> None:
    with running(fast, page=False) as server:
        assert [httpx.get(server.url + path).status_code for path in ("/", "/page/app.js", "/live")] == [404] * 3
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_card_of_a_model_names_the_drafters_of_requests(server: Running) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["drafts"] == ["auto", "suffix", "none"]
    for name in card["drafts"]:
        body = {"prompt": "import", "max_tokens": 2, "draft": name}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200


def test_the_card_says_whether_the_model_has_a_chat_template(fast: Accelerated, tmp_path: Path) -> None:
    """The playground opens on chat where it does; the plain text that stands in for a template is none."""
    (tmp_path / "template").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for settings, chat in (
        ({}, False),
        ({"chat_template": "plain"}, False),
        ({"chat_template": str(tmp_path / "template")}, True),
    ):
        with running(fast, **settings) as server:
            (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
            assert card["chat"] is chat


# ---------------------------------------------------------------- the feed


def test_counts_of_the_feed_are_those_of_the_responses(fast: Accelerated) -> None:
    with running(fast, max_rows=3) as server, feed_of(server) as feed:
        idle = next(feed)
        assert idle["running"] == [] and idle["tokens"] == idle["row_passes"] == idle["rows"] == 0
        assert (idle["model"], idle["guarantee"], idle["max_rows"]) == ("nano", "tokens", 3)
        sums = dict.fromkeys(("tokens", "row_passes", "drafted_tokens", "accepted_tokens", "prompt_tokens"), 0)
        for i in range(100):
            if i > 3 and sums["accepted_tokens"]:  # on a busy machine drafts may not seem to pay at first
                break
            body = {"prompt": "x = 1\n" * 6, "max_tokens": 30 + i, "temperature": 0}
            response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            figures = response["truedraft"] | {"row_passes": response["truedraft"]["passes"]}
            figures["prompt_tokens"] = response["usage"]["prompt_tokens"]
            assert figures["drafter"] == idle["drafter"]
            for name in sums:
                sums[name] += figures[name]
        assert sums["accepted_tokens"] > 0
        last = until(lambda: (found := next(feed))["tokens"] == sums["tokens"] and found)
        assert {name: last[name] for name in sums} == sums
        assert last["mean_acceptance_length"] == round(sums["tokens"] / sums["row_passes"], 4)
        assert last["tokens_per_second"] > 0 and last["passes_per_second"] > 0


def test_rows_are_listed_as_they_run_and_wait_also_while_the_engine_is_held_up(fast: Accelerated) -> None:
    with running(fast, max_rows=2) as server:
        jobs = server.server.loop.running
        thread = in_background(server, LONG | {"n": 3, "max_tokens": 500})
        until(lambda: sum(len(job.tokens) > 5 for job in list(jobs.values())) == 2)
        with paused(server), feed_of(server) as feed:
            next(feed)
            found = next(feed)
            assert (found["rows"], found["waiting"], found["cache_usage"]) == (2, 1, 1)
            assert [row["state"] for row in found["running"]] == ["running", "running", "waiting"]
            assert [row["tokens"] for row in found["running"][:2]] == [len(job.tokens) for job in jobs.values()]
            assert [row["passes"] for row in found["running"][:2]] == [job.passes for job in jobs.values()]
            (prompt,) = {row["prompt_tokens"] for row in found["running"]}
            assert prompt == len(fast.tokenizer(LONG["prompt"]).input_ids)  # type: ignore[misc]
            (id,) = {row["id"] for row in found["running"]}
            assert re.fullmatch("cmpl-[0-9a-f]{32}", id)
            assert next(feed)["running"][0]["seconds"] > found["running"][0]["seconds"]
        thread.join()
        with feed_of(server) as feed:
            last = next(feed)
            assert (last["running"], last["rows"], last["waiting"]) == ([], 0, 0)


def test_with_keys_only_own_rows_are_listed(keyed: Running) -> None:
    first, second = KEYS
    for headers in ({}, {"Authorization": "Bearer another-key-16-ch"}, {"Authorization": f"Basic {first}"}):
        response = httpx.get(f"{keyed.url}/live", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    threads = [in_background(keyed, LONG | {"max_tokens": 500}, key) for key in (first, second, second)]
    until(lambda: len(keyed.server.loop.running) == 3)
    with paused(keyed), feed_of(keyed, first) as mine, feed_of(keyed, second) as theirs:
        own, others = next(mine), next(theirs)
        assert (len(own["running"]), len(others["running"])) == (1, 2)
        assert not {row["id"] for row in own["running"]} & {row["id"] for row in others["running"]}
        assert own["rows"] == others["rows"] == 3
    for thread in threads:
        thread.join()


def test_the_feed_ends_when_the_server_does(server: Running) -> None:
    with feed_of(server) as feed:
        assert next(feed)
        server.server.draining = True
        try:
            assert len(list(feed)) <= 1
            response = httpx.get(f"{server.url}/live")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "ending")
        finally:
            server.server.draining = False


def test_a_client_that_goes_away_is_no_watcher_any_more(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WATCHERS", 1)
    watchers = server.app.state.feed.watchers
    until(lambda: watchers[""] == 0)
    with feed_of(server) as feed:
        assert next(feed) and watchers[""] == 1
        response = httpx.get(f"{server.url}/live")
        assert (response.status_code, response.headers["retry-after"]) == (429, "10")
    until(lambda: watchers[""] == 0)
    with feed_of(server) as feed:
        assert next(feed)


def test_a_client_that_does_not_read_is_dropped(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = live.Feed(server.server, server.server.model.fast)
    monkeypatch.setattr(server.server, "config", ServeConfig(model="nano", write_seconds=0.1))
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def dropped() -> None:
        await asyncio.wait_for(live.FeedResponse(feed, "")({}, receive, send), 20)

    asyncio.run(dropped())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert feed.watchers[""] == 0


def test_watchers_of_a_namespace_share_a_snapshot(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = live.Feed(server.server, server.server.model.fast)
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    first = feed.event("")
    assert feed.event("") is first and feed.event("other") is not first
    now[0] += live.INTERVAL
    assert feed.event("") is not first


def test_a_collection_that_changes_is_copied_at_another_try() -> None:
    class Changing:
        def __init__(self, times: int):
            self.times = times

        def __iter__(self) -> Iterator[str]:
            self.times -= 1
            yield "a job"
            if self.times >= 0:
                raise RuntimeError("dictionary changed size during iteration")

    assert live._copied(Changing(3)) == ["a job"]
    assert live._copied(Changing(10**6)) == []
