"""What a page gets: headless Chromium, the real nginx with TLS and HTTP/2, the gateway and the real engine.

The pages are scripts of this file, run on the gateway's own origin. What they show is compared with what a
client without proxy or browser gets for the same request.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from tests.e2e.asking import CHAT
from tests.e2e.nginx_site import Nginx, start_nginx
from tests.e2e.resting import assert_no_fault, at_rest, children
from tests.e2e.resuming import DONE, STREAMS, events, read, text_of, told
from tests.gateway.browser import Tab, open_tab, running_browser
from tests.stack import Gateway, Worker

pytestmark = [pytest.mark.engine, pytest.mark.browser]

MODEL: Final = "smollm2-135m-instruct"
NUM_PARALLEL: Final = 12  # HTTP/1.1 allows a browser six connections to a host

# What a page of a user would do, no more. `shown` is what it shows, `kept` what survives a reload.
APP: Final = """
window.start = async body => {
  const headers = {'content-type': 'application/json'};
  const response = await fetch('/v1/streams', {method: 'POST', headers, body: JSON.stringify(body)});
  if (response.status !== 201) throw new Error(await response.text());
  return response.json();
};
window.follow = (url, keeps, kept = {text: '', last: 0}) => {
  const source = new EventSource(kept.last ? `${url}&last_event_id=${kept.last}` : url);
  const shown = {...kept, source, url, end: null, gaps: 0, opens: 0, errors: 0, firstAt: 0, endAt: 0};
  source.onopen = () => { shown.opens += 1; };
  source.onerror = () => { shown.errors += 1; };
  const next = event => {
    const number = Number(event.lastEventId);
    shown.gaps += number !== shown.last + 1;
    shown.last = number;
    shown.firstAt ||= performance.now();
  };
  source.onmessage = event => {
    next(event);
    const {choices} = JSON.parse(event.data);
    shown.text += choices[0]?.delta.content ?? '';
    const {text, last} = shown;
    if (keeps) sessionStorage.setItem('kept', JSON.stringify(keeps === 'all' ? {url, text, last} : {url}));
  };
  for (const end of ['done', 'failed'])
    source.addEventListener(end, event => {
      next(event);
      shown.end = {type: end, data: event.data};
      shown.endAt = performance.now();
    });
  return shown;
};
window.say = async body => {
  const headers = {'content-type': 'application/json'};
  const said = {text: '', pieces: 0, firstAt: 0, endAt: 0, isDone: false};
  const response = await fetch('/v1/chat/completions', {method: 'POST', headers, body: JSON.stringify(body)});
  let rest = '';
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    said.firstAt ||= performance.now();
    said.pieces += 1;
    const frames = (rest + piece).split('\\n\\n');
    rest = frames.pop();
    for (const frame of frames) {
      if (frame === 'data: [DONE]') said.isDone = true;
      else if (!frame.startsWith(':')) said.text += JSON.parse(frame.slice(6)).choices[0].delta.content ?? '';
    }
  }
  said.endAt = performance.now();
  return said;
};
const kept = JSON.parse(sessionStorage.getItem('kept') ?? 'null');
if (kept) window.shown = follow(kept.url, 'last' in kept ? 'all' : 'url', 'last' in kept ? kept : undefined);
"""


@pytest.fixture(scope="module")
def nginx(engine_gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("real_browser")
    with start_nginx(folder, f"127.0.0.1:{engine_gateway.port}") as started:
        yield started
    assert_no_fault(engine_gateway)


@pytest.fixture(scope="module")
def browser_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The site's certificate is its own."""
    with running_browser(tmp_path_factory.mktemp("browser"), "--ignore-certificate-errors") as port:
        yield port


@pytest.fixture
async def tab(browser_port: int, nginx: Nginx) -> AsyncIterator[Tab]:
    """A tab of the gateway's own origin."""
    async with open_tab(browser_port) as opened:
        await opened.on_each_page(APP)
        await opened.open(f"https://localhost:{nginx.tls_port}/docs")
        yield opened
        assert opened.complaints() == []


def body(content: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Of exactly so many tokens, always the same."""
    messages = [{"role": "user", "content": content}]
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": MODEL, "messages": messages, "stream": True, **sampling, **fields}


STORY: Final = body("Tell me a story about a mill and its river, with a few emojis.", 64)


@pytest.fixture(scope="module")
def story(engine_gateway: Gateway) -> str:
    """What the engine says to it. The prefix cache has the prompt from here on, the same for all."""
    asyncio.run(text_of(engine_gateway.port, STORY | {"max_tokens": 1}))
    return asyncio.run(text_of(engine_gateway.port, STORY))


async def test_fetch_streams_each_token(tab: Tab, story: str) -> None:
    said = await tab.run(f"say({json.dumps(STORY)})")
    assert (said["text"], said["isDone"]) == (story, True)
    assert said["pieces"] > 32, "64 tokens, and the answer came in few pieces"
    assert await protocols(tab, CHAT) == {"h2"}


async def protocols(tab: Tab, path: str) -> set[str]:
    """How requests to this path went, as the page itself sees it."""
    entries = "performance.getEntriesByType('resource')"
    chosen = f"filter(each => new URL(each.name).pathname.startsWith('{path}'))"
    return set(await tab.run(f"{entries}.{chosen}.map(each => each.nextHopProtocol)"))


async def begin(tab: Tab, request: dict[str, Any], keeps: str = "") -> str:
    """Start a stream and follow it as `shown`; the path that an EventSource is given."""
    script = (
        f"start({json.dumps(request)}).then(({{url}}) => {{ shown = follow(url, '{keeps}'); return url; }})"
    )
    return str(await tab.run(script))


async def ended(tab: Tab) -> dict[str, Any]:
    """What is shown at the end, when EventSource has been told not to come back."""
    await tab.until("shown.end !== null && shown.source.readyState === EventSource.CLOSED")
    shown: dict[str, Any] = await tab.run("({...shown, source: null})")
    assert shown["end"] == {"type": DONE, "data": "[DONE]"}
    assert shown["gaps"] == 0, "an event is missing, or came twice"
    return shown


async def test_event_source_streams_and_does_not_come_back(
    tab: Tab, nginx: Nginx, engine_gateway: Gateway
) -> None:
    url = await begin(tab, STORY | {"max_tokens": 16})
    shown = await ended(tab)
    assert shown["text"] == told((await read(engine_gateway.port, url)).messages).text
    assert shown["opens"] == 1
    assert shown["errors"] == 2  # the end of the stream, which looks like any other, and the 204
    path = url.partition("?")[0]
    nginx.process.wait_until(lambda: nginx.access_log.count(path) == 2, 20, "logging both requests")
    assert await protocols(tab, path) == {"h2"}
    lines = [line.split() for line in nginx.access_log.splitlines() if path in line]
    assert [line[line.index(path) + 1] for line in lines] == ["200", "204"]


@pytest.mark.parametrize("keeps", ["all", pytest.param("url", marks=pytest.mark.long)])
async def test_reload_in_mid_stream_loses_and_doubles_nothing(
    tab: Tab, engine_gateway: Gateway, engine_worker: Worker, story: str, keeps: str
) -> None:
    """With its text and position kept, the page goes on; with the URL alone, it begins again."""
    url = await begin(tab, STORY, keeps)
    for least in (8, 24):
        await tab.until(f"shown.last > {least}")
        assert await tab.run("shown.end") is None or least > 8, "there was nothing to interrupt"
        await tab.reload()
    shown = await ended(tab)
    assert shown["text"] == story
    direct = await read(engine_gateway.port, url)
    assert told(direct.messages).text == story
    assert shown["last"] == len(direct.messages)
    await tab.run("sessionStorage.clear()")
    at_rest(engine_gateway, [engine_worker])


async def test_connection_that_breaks_loses_and_doubles_nothing(tab: Tab, nginx: Nginx, story: str) -> None:
    """nginx's worker is killed, another takes its place, and the rest is EventSource's own."""
    await begin(tab, STORY)
    await tab.until("shown.last > 8")
    assert await tab.run("shown.end") is None, "there was nothing to break"
    (worker,) = children(nginx.process.pid)
    os.kill(worker, signal.SIGKILL)
    shown = await ended(tab)
    assert shown["text"] == story
    assert shown["opens"] == 2
    tab.events.clear()  # the console has said that a request failed


@pytest.mark.parametrize("way", ["EventSource", "fetch"])
async def test_twelve_streams_in_one_tab_run_at_once(
    tab: Tab, engine_gateway: Gateway, engine_worker: Worker, way: str
) -> None:
    # Of a length that the last one has begun long before the first one ends, however slow the machine is.
    requests = [body(f"Count from {number}.", 64) for number in range(NUM_PARALLEL)]
    if way == "fetch":
        all_said = f"Promise.all({json.dumps(requests)}.map(say))"
        shown = await tab.run(all_said)
        assert all(each["isDone"] for each in shown)
        path = CHAT
    else:
        shown = await follow_all(tab, engine_gateway, requests)
        path = STREAMS
    assert max(each["firstAt"] for each in shown) < min(each["endAt"] for each in shown)
    assert await protocols(tab, path) == {"h2"}
    assert len(connections(tab, path)) == 1
    at_rest(engine_gateway, [engine_worker])


async def follow_all(tab: Tab, gateway: Gateway, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them through EventSource; each shows what a direct reader of its stream gets."""
    await tab.run(
        f"Promise.all({json.dumps(requests)}.map(start)).then(all => {{"
        " window.all = all.map(({url}) => follow(url)); })"
    )
    await tab.until("all.every(each => each.source.readyState === EventSource.CLOSED)")
    shown: list[dict[str, Any]] = await tab.run("all.map(each => ({...each, source: null}))")
    for each in shown:
        direct = await read(gateway.port, each["url"])
        assert told(direct.messages).is_done
        assert told(direct.messages).text == each["text"]
        assert (each["gaps"], each["last"]) == (0, len(events(direct.messages)))
    return shown


def connections(tab: Tab, path: str) -> set[int]:
    """The numbers of the browser's connections that brought responses of this path."""
    received = [each["response"] for each in tab.named("Network.responseReceived")]
    return {each["connectionId"] for each in received if path in each["url"] and each["protocol"] == "h2"}
