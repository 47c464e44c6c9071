"""A page that talks over WebSocket: headless Chromium, the real nginx with TLS, the gateway, the real engine.

The page's script is here, run on the gateway's own origin; what it shows is compared with what a client
without proxy or browser gets.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from tests.e2e.nginx_site import Nginx, start_nginx
from tests.e2e.realtime import DELTA, PATH, Spoken, spoken, talking
from tests.e2e.resting import assert_no_fault, at_rest, logged
from tests.gateway.browser import Tab, open_tab, running_browser
from tests.stack import Gateway, Worker

pytestmark = [pytest.mark.engine, pytest.mark.browser]

MODEL: Final = "smollm2-135m-instruct"
NUM_PARALLEL: Final = 12
SAMPLING: Final[dict[str, Any]] = {"temperature": 0, "max_output_tokens": 16, "ignore_eos": True}
STORY: Final = "Tell me a story about a mill and its river."

# What a page of a user would do. `events` are all that came, `text` what the running answer shows.
APP: Final = """
window.talkTo = model => {
  const protocols = ['realtime', 'openai-insecure-api-key.of-a-page'];
  const socket = new WebSocket(`wss://${location.host}/v1/realtime?model=${model}`, protocols);
  const talk = {socket, events: [], text: '', pieces: 0, close: null};
  socket.onmessage = ({data}) => {
    const event = JSON.parse(data);
    talk.events.push(event);
    if (event.type === 'response.output_text.delta') {
      talk.text += event.delta;
      talk.pieces += 1;
    }
  };
  socket.onclose = ({code, wasClean}) => { talk.close = {code, wasClean}; };
  talk.send = event => socket.send(JSON.stringify(event));
  talk.ask = (text, response) => {
    Object.assign(talk, {text: '', pieces: 0});
    const content = [{type: 'input_text', text}];
    talk.send({type: 'conversation.item.create', item: {type: 'message', role: 'user', content}});
    talk.send({type: 'response.create', response});
  };
  talk.count = type => talk.events.filter(event => event.type === type).length;
  return talk;
};
"""


@pytest.fixture(scope="module")
def nginx(engine_gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("realtime_browser")
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


async def begin(tab: Tab) -> None:
    """Open a conversation as `talk`; its session has been created."""
    await tab.run(f"(window.talk = talkTo('{MODEL}'), null)")
    await tab.until("talk.count('session.created') === 1")
    assert await tab.run("[talk.socket.protocol, talk.socket.extensions]") == ["realtime", ""]


async def ask(tab: Tab, text: str, **fields: Any) -> None:
    await tab.run(f"talk.ask({json.dumps(text)}, {json.dumps(SAMPLING | fields)})")


async def answer(tab: Tab, number: int) -> Spoken:
    """The whole response of this number, whose events came in order; the page shows its text."""
    await tab.until(f"talk.count('response.done') === {number}")
    events = await tab.run("talk.events")
    assert not [event for event in events if event["type"] == "error"]
    done = [event["response"]["id"] for event in events if event["type"] == "response.done"]
    said = spoken(events, done[-1])
    assert await tab.run("talk.text") == said.text
    return said


def held_by_talks(gateway: Gateway, worker: Worker) -> dict[str, float]:
    """What is held at rest. nginx keeps some connections to the gateway open, so they do not count."""
    figures = at_rest(gateway, [worker])
    return {name: value for name, value in figures.items() if not name.endswith("descriptors")}


async def test_a_page_holds_a_conversation_with_a_cancel(
    tab: Tab, nginx: Nginx, engine_gateway: Gateway, engine_worker: Worker
) -> None:
    before = held_by_talks(engine_gateway, engine_worker)
    await begin(tab)
    await ask(tab, "What is the capital of France?")
    first = await answer(tab, 1)
    assert len(first.deltas) > 8, "16 tokens, and the answer came in few pieces"

    await ask(tab, STORY, max_output_tokens=4000)
    await tab.until("talk.pieces >= 5")
    await tab.run("talk.send({type: 'response.cancel'})")
    cancelled = await answer(tab, 2)
    assert cancelled.status == "cancelled"
    assert len(cancelled.deltas) < 2000

    await ask(tab, "Say hello.")
    last = await answer(tab, 3)
    assert last.status == "incomplete"
    assert last.response["usage"]["input_tokens"] > cancelled.response["usage"]["input_tokens"]
    await tab.run("talk.socket.close(1000, 'enough')")
    await tab.until("talk.close !== null")
    assert await tab.run("talk.close") == {"code": 1000, "wasClean": True}
    assert logged(engine_gateway, cancelled.id)["ended"] == "cancelled"
    assert PATH in nginx.access_log
    assert held_by_talks(engine_gateway, engine_worker) == before


async def test_a_page_shows_what_any_client_gets(tab: Tab, engine_gateway: Gateway) -> None:
    async with talking(engine_gateway.port, MODEL) as talk:
        await talk.ask(STORY, **SAMPLING)  # from here on the engine's cache has the prompt
    async with talking(engine_gateway.port, MODEL) as talk:
        direct = await talk.ask(STORY, **SAMPLING)
    await begin(tab)
    await ask(tab, STORY)
    assert (await answer(tab, 1)).text == direct.text
    await tab.run("talk.socket.close()")


async def test_a_page_that_is_left_stops_the_engine(
    tab: Tab, engine_gateway: Gateway, engine_worker: Worker
) -> None:
    """Reloaded in mid-answer: nginx and the gateway tell the engine."""
    before = held_by_talks(engine_gateway, engine_worker)
    await begin(tab)
    await ask(tab, STORY, max_output_tokens=4000)
    await tab.until("talk.pieces >= 3")
    events = await tab.run("talk.events")
    (response_id,) = {event["response_id"] for event in events if event["type"] == DELTA}
    await tab.reload()
    assert logged(engine_gateway, response_id)["ended"] == "client_closed"
    assert held_by_talks(engine_gateway, engine_worker) == before


async def test_twelve_conversations_of_one_page_run_at_once(
    tab: Tab, engine_gateway: Gateway, engine_worker: Worker
) -> None:
    await tab.run(f"(window.all = Array.from({{length: {NUM_PARALLEL}}}, () => talkTo('{MODEL}')), null)")
    await tab.until("all.every(talk => talk.count('session.created') === 1)")
    await tab.run(f"all.forEach((talk, n) => talk.ask(`Count from ${{n}}.`, {json.dumps(SAMPLING)}))")
    await tab.until("all.every(talk => talk.count('response.done') === 1)")
    for events in await tab.run("all.map(talk => talk.events)"):
        assert events[-1]["response"]["usage"]["output_tokens"] == SAMPLING["max_output_tokens"]
        assert spoken(events, events[-1]["response"]["id"]).text
    await tab.run("all.forEach(talk => talk.socket.close())")
    await tab.until("all.every(talk => talk.close)")
    at_rest(engine_gateway, [engine_worker])
