"""The chat page and the documentation in a real browser, in front of a server that answers on command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.browser import Tab, open_tab, running_browser
from tests.gateway.page_server import KEY, PageServer, page_server

pytestmark = pytest.mark.browser

ANSWER = "流水 runs\u2028on."
LAST = "document.querySelector('#log > li:last-child')"


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    async with page_server() as running:
        yield running


@pytest.fixture(scope="module")
def browser_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_browser(tmp_path_factory.mktemp("browser")) as port:
        yield port


@pytest.fixture
async def tab(browser_port: int) -> AsyncIterator[Tab]:
    async with open_tab(browser_port) as opened:
        yield opened


async def open_chat(tab: Tab, server: PageServer) -> None:
    await tab.open(server.url)
    await tab.until("!document.getElementById('model').disabled")


async def ask(tab: Tab, question: str) -> None:
    """Type a question and press Enter."""
    await tab.run(
        f"""(() => {{
            const field = document.getElementById('prompt');
            field.value = {json.dumps(question)};
            field.dispatchEvent(new Event('input'));
            const key = {{key: 'Enter', bubbles: true, cancelable: true}};
            field.dispatchEvent(new KeyboardEvent('keydown', key));
        }})()"""
    )


async def ended(tab: Tab) -> None:
    await tab.until("document.getElementById('log').getAttribute('aria-busy') === 'false'")


async def last_text(tab: Tab) -> str:
    return str(await tab.run(f"{LAST}.querySelector('.text').textContent"))


async def set_field(tab: Tab, name: str, value: str) -> None:
    await tab.run(
        f"(() => {{const field = document.getElementById('{name}'); field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('change'));})()"
    )


async def test_chat_streams_text_and_keeps_the_history(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    await set_field(tab, "system", "Be brief.")
    await set_field(tab, "temperature", "0.5")
    await set_field(tab, "max-tokens", "7")
    for question in ("one", "two"):
        await ask(tab, question)
        await ended(tab)
        assert await last_text(tab) == ANSWER
    numbers = await tab.run(f"{LAST}.querySelector('.numbers').textContent")
    for part in ("first token after", "tokens/s", "4 tokens", "16 of 20 prompt tokens cached"):
        assert part in numbers
    assert server.bodies[-1] == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "two"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 7,
    }
    await tab.run("document.getElementById('new').click()")
    assert await tab.run("document.querySelectorAll('#log > li').length") == 0
    assert tab.complaints() == []
    assert all(url.startswith(server.url) for url in tab.requested_urls())


async def test_model_output_stays_text(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    await ask(tab, "html")
    await ended(tab)
    assert await last_text(tab) == "<b>bold</b> <script>document.title='broken'</script>"
    assert await tab.run("document.title") == "Headrace"
    assert await tab.run("document.querySelectorAll('#log b, #log script').length") == 0


@pytest.mark.parametrize(
    ("question", "message", "text"),
    [
        ("error 400", "'temperature' must be at most 2.0, got 3.", ""),
        ("frame error", "The worker was lost.", ANSWER),
        ("break", "The connection broke before the answer was complete.", ANSWER),
    ],
)
async def test_failure_is_shown_and_can_be_tried_again(
    tab: Tab, server: PageServer, question: str, message: str, text: str
) -> None:
    await open_chat(tab, server)
    await ask(tab, question)
    await ended(tab)
    assert await tab.run(f"{LAST}.querySelector('[role=alert] span').textContent") == message
    assert await last_text(tab) == text
    await tab.run(f"{LAST}.querySelector('[role=alert] button').click()")
    await ended(tab)
    assert await tab.run("document.querySelectorAll('#log > li').length") == 2
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": question}]] * 2


async def test_stop_ends_the_request_and_keeps_what_came(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    await ask(tab, "forever")
    await tab.until(f"{LAST}.querySelector('.text').textContent.includes('on. on on')")
    await tab.run("document.getElementById('stop').click()")
    await ended(tab)
    async with asyncio.timeout(10):
        while server.num_closed_early == 0:  # noqa: ASYNC110, the server has no event for it
            await asyncio.sleep(0.02)
    await ask(tab, "more")
    await ended(tab)
    assert server.bodies[-1]["messages"][1]["content"].startswith(ANSWER + " on on")


async def test_reasoning_is_shown_apart(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    await ask(tab, "think")
    await ended(tab)
    assert await tab.run(f"{LAST}.querySelector('.reasoning').textContent") == "First, the facts."
    assert await last_text(tab) == ANSWER


async def test_tool_calls_are_shown_as_text(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    await ask(tab, "call")
    await ended(tab)
    shown = "querySelectorAll('.call')].map((each) => [...each.children].map((part) => part.textContent))"
    assert await tab.run(f"[...{LAST}.{shown}") == [
        ["Calls <b>find</b>", '{"q":"<b>x</b>"}'],
        ["Calls stop", ""],
    ]
    assert await last_text(tab) == ANSWER
    assert await tab.run("document.querySelectorAll('#log b').length") == 0


async def test_answer_in_a_wrong_format_is_marked(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    for question, problems in (("one", []), ("bad format", ["Not in the format asked for: <b>no JSON</b>"])):
        await ask(tab, question)
        await ended(tab)
        shown = "querySelectorAll('.problem')].map((each) => each.textContent)"
        assert await tab.run(f"[...{LAST}.{shown}") == problems


async def test_key_is_asked_for_and_kept_in_this_tab_only(tab: Tab, server: PageServer) -> None:
    server.needs_key = True
    await tab.open(server.url)
    await tab.until("document.getElementById('status').textContent.includes('API key')")
    await set_field(tab, "key", KEY)
    await tab.until("!document.getElementById('model').disabled")
    await ask(tab, "one")
    await ended(tab)
    assert await last_text(tab) == ANSWER
    assert await tab.run("[localStorage.length, sessionStorage.getItem('headrace.key')]") == [0, KEY]


async def test_page_waits_for_the_first_model(tab: Tab, server: PageServer) -> None:
    server.models = []
    await tab.open(server.url)
    await tab.until("document.getElementById('status').textContent.startsWith('No model is ready')")
    server.models = [{"id": "late", "scripted": True}]
    await tab.until("!document.getElementById('model').disabled")
    assert await tab.run("document.getElementById('model').selectedOptions[0].text") == "late (scripted)"


async def test_events_are_cut_at_cr_and_lf_only(tab: Tab, server: PageServer) -> None:
    await open_chat(tab, server)
    stream = ': ping\n\ndata: {"a":"x\u2028y\u0085z"}\r\n\r\ndata: 1\rdata: 2\r\revent: e\ndata:3\n\n'
    expected = ['{"a":"x\u2028y\u0085z"}', "1\n2", "3"]
    script = f"""import('./static/sse.js').then(({{EventParser}}) => {{
        const stream = {json.dumps(stream)};
        const read = (pieces) => {{
            const parser = new EventParser();
            return JSON.stringify(pieces.flatMap((piece) => parser.feed(piece)));
        }};
        const results = new Set([read([stream]), read([...stream])]);
        for (let cut = 0; cut <= stream.length; cut++) {{
            results.add(read([stream.slice(0, cut), stream.slice(cut)]));
        }}
        return [...results].map((each) => JSON.parse(each));
    }})"""
    assert await tab.run(script) == [expected]


async def test_docs_show_every_route_and_run_a_chat(tab: Tab, server: PageServer) -> None:
    await tab.open(server.url + "docs")
    await tab.until("document.querySelectorAll('#schemas section').length > 10")
    paths = await tab.run(
        "[...document.querySelectorAll('#routes .address')].map((each) => each.textContent)"
    )
    assert "POST/v1/chat/completions" in paths
    assert len(paths) == len(set(paths)) > 8
    page = await tab.run("document.body.innerText")
    assert f"curl -N {server.url}v1/chat/completions" in page
    for part in ("0 to 2", "at most 4 items", "list of Message"):
        assert part in page
    links = await tab.run(
        "[...document.querySelectorAll('main a[href^=\"#\"], #contents a')]"
        ".filter((each) => !document.getElementById(each.hash.slice(1))).length"
    )
    assert links == 0
    await tab.run("document.getElementById('try-form').requestSubmit()")
    await tab.until(f"document.getElementById('try-out').textContent === {json.dumps(ANSWER)}")
    assert server.bodies[-1]["model"] == "tiny"
    assert tab.complaints() == []
    assert all(url.startswith(server.url) for url in tab.requested_urls())


@pytest.mark.parametrize("path", ["", "docs"])
async def test_page_fits_a_phone(tab: Tab, server: PageServer, path: str) -> None:
    await tab.command(
        "Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True
    )
    await tab.open(server.url + path)
    await tab.until("document.readyState === 'complete' && document.querySelectorAll('option').length > 0")
    assert await tab.run("document.documentElement.scrollWidth") <= 360
