"""The pages: `/` to chat, `/docs` to read, and the files they load. Nothing is fetched from elsewhere.

Files are read once, when the routes are built. The pages use relative addresses, so they also work behind a
path prefix of a proxy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.openai_schema import RequestLimits
from gateway.openapi import document

# Scripts and styles from this server only, none inline; no frames, no forms sent anywhere, no other hosts.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asks each time, and gets 304 while nothing has changed
}
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGES: Final = {"/": "index.html", "/docs": "docs.html"}


class Page:
    """A file as it is served."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type
        self._headers = {**PAGE_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 for a client that has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._media_type)


def page_routes(version: str, limits: RequestLimits | None = None) -> Sequence[Route]:
    """GET routes of the pages, their files and `/openapi.json`, for a gateway of this version and limits."""
    files = {name: Page(content, _MEDIA_TYPES[ending]) for name, ending, content in _static_files()}
    openapi = Page(msgspec.json.encode(document(version, limits)), "application/json")
    return (
        *(Route(path, files[name].answer) for path, name in _PAGES.items()),
        *(Route(f"/static/{name}", page.answer) for name, page in files.items()),
        Route("/openapi.json", openapi.answer),
    )


def _static_files() -> Iterator[tuple[str, str, bytes]]:
    """Name, ending and content of every file that is served."""
    for file in (resources.files("gateway") / "static").iterdir():
        ending = file.name[file.name.rfind(".") :]
        if ending in _MEDIA_TYPES:
            yield file.name, ending, file.read_bytes()
