"""Headless Chromium for tests of the pages, driven through its own protocol (Chrome DevTools Protocol)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from websockets.asyncio.client import ClientConnection, connect

from tests.components import need
from tests.processes import Process

LIMIT_S = 30.0
# Without a network of its own: no updates, no QUIC, nothing in the background.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Tab:
    """One page. Methods raise `AssertionError` when the page fails or `LIMIT_S` has passed."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a protocol command and wait for its result; events on the way are kept in `events`."""
        self._last_id += 1
        await self._connection.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = json.loads(await self._connection.recv())
                if message.get("id") == self._last_id:
                    assert "error" not in message, message["error"]
                    return dict(message["result"])
                self.events.append(message)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")
        await self.command("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def on_each_page(self, script: str) -> None:
        """Run a script in every page from now on, before its own; a page's policy does not apply to it."""
        await self.command("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def reload(self) -> None:
        """Returns when the new page has loaded."""
        num_loads = len(self.named("Page.loadEventFired"))
        await self.command("Page.reload")
        async with asyncio.timeout(LIMIT_S):
            while len(self.named("Page.loadEventFired")) == num_loads:
                self.events.append(json.loads(await self._connection.recv()))

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.run(script):  # noqa: ASYNC110, the page has no event for it
                await asyncio.sleep(0.02)

    def complaints(self) -> list[str]:
        """What the console shows as errors: exceptions, refused resources, broken policies."""
        thrown = [event for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        logged = [
            event["params"]["entry"]["text"]
            for event in self.events
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"
        ]
        return [json.dumps(event["params"]) for event in thrown] + logged

    def named(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of this name that have come."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def requested_urls(self) -> list[str]:
        return [str(sent["request"]["url"]) for sent in self.named("Network.requestWillBeSent")]


@contextmanager
def running_browser(folder: Path, *flags: str) -> Iterator[int]:
    """The port of a browser of our own, with more flags. Skips the test where there is no Chromium."""
    profile = folder / "profile"
    port_file = profile / "DevToolsActivePort"
    command = [need("chromium"), *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"]
    process = Process("chromium", command, folder / "chromium.log")
    try:
        process.wait_until(lambda: port_file.exists() and "\n" in port_file.read_text(), LIMIT_S, "no port")
        yield int(port_file.read_text().splitlines()[0])
    finally:
        process.kill()


@asynccontextmanager
async def open_tab(browser_port: int) -> AsyncIterator[Tab]:
    """An empty tab with a session storage of its own, closed at the end."""
    target = await asyncio.to_thread(_new_target, browser_port)
    async with connect(target, max_size=None, compression=None, ping_interval=None) as connection:
        tab = Tab(connection)
        yield tab
        await tab.command("Page.close")


def _new_target(browser_port: int) -> str:
    request = Request(f"http://127.0.0.1:{browser_port}/json/new?about:blank", method="PUT")
    with urlopen(request, timeout=LIMIT_S) as response:
        return str(json.load(response)["webSocketDebuggerUrl"])
