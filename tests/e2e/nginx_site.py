"""The site of `nginx/` under the real nginx. Only ports, paths and the upstream's address are the test's.

Not here: what is asked through it, and the upstream that a test plays (`played_upstream.py`).
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.components import need
from tests.processes import ROOT, Process, answers, free_port
from tests.stack import running

SITE: Final = ROOT / "nginx" / "headrace.conf"
TWO_GATEWAYS: Final = ROOT / "nginx" / "two-gateways.conf"
HTTP3: Final = ROOT / "nginx" / "http3.conf"

# What a server's own nginx.conf has. Its error log must say everything that it can.
MAIN: Final = """
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log {folder}/error.log notice;
events {{ worker_connections 256; }}
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
    """A running nginx with our site. `upstream` is where it expects the gateway: mostly a test's socket."""

    process: Process
    folder: Path
    port: int
    tls_port: int
    upstream: Path

    @property
    def access_log(self) -> str:
        return (self.folder / "access.log").read_text()

    @property
    def error_log(self) -> str:
        return (self.folder / "error.log").read_text()

    def tls(self, protocol: str = "http/1.1") -> ssl.SSLContext:
        """For a client that trusts this site and speaks `http/1.1` or `h2`."""
        context = ssl.create_default_context(cafile=self.folder / "headrace.crt")
        context.set_alpn_protocols([protocol])
        return context


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """The text with each key, which must be there exactly once, replaced by its value."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the site"
        text = text.replace(old, new)
    return text


def site(changes: Mapping[str, str] | None = None) -> str:
    """headrace.conf with these changes."""
    return replaced(SITE.read_text(), changes or {})


def two_gateways(first: str, second: str) -> str:
    """headrace.conf as two-gateways.conf tells to change it, with these addresses."""
    text = site({"proxy_next_upstream off;": "proxy_next_upstream error timeout;"})
    start = text.index("upstream headrace {")
    end = text.index("\n}\n", start) + len("\n}\n")
    servers = {"server 10.0.0.11:8000 ": f"server {first} ", "server 10.0.0.12:8000 ": f"server {second} "}
    return text[:start] + replaced(TWO_GATEWAYS.read_text(), servers) + text[end:]


def behind_balancer(trusted: str) -> str:
    """headrace.conf for an nginx behind load balancers of these addresses, as its example tells."""
    example = {
        "# set_real_ip_from  10.0.0.0/8;": f"set_real_ip_from {trusted};",
        "# real_ip_header    X-Forwarded-For;": "real_ip_header X-Forwarded-For;",
        "# real_ip_recursive on;": "real_ip_recursive on;",
    }
    return site(example)


def write_site(
    folder: Path, port: int, tls_port: int, upstream: str = "127.0.0.1:8000", text: str | None = None
) -> list[str]:
    """The site and a frame around it in `folder`; the command that runs nginx with it."""
    text = replaced(
        text if text is not None else site(),
        {
            "listen 443 ssl sndbuf=128k;": f"listen 127.0.0.1:{tls_port} ssl sndbuf=128k;",
            "listen 127.0.0.1:8080 sndbuf=128k;": f"listen 127.0.0.1:{port} sndbuf=128k;",
            "/etc/nginx/headrace.crt": f"{folder}/headrace.crt",
            "/etc/nginx/headrace.key": f"{folder}/headrace.key",
            "/var/log/nginx/headrace.log": f"{folder}/access.log",
        },
    )
    (folder / "headrace.conf").write_text(text.replace("server 127.0.0.1:8000;", f"server {upstream};"))
    # As root, nginx would drop to a user who may not enter the test's folder.
    user = "user root;" if folder.owner() == "root" else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    make_certificate(folder / "headrace.key", folder / "headrace.crt")
    return [need("nginx"), "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]


def make_certificate(key: Path, certificate: Path) -> None:
    """A self-signed one for localhost."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([need("openssl"), *options.split(), *names, *files], check=True, capture_output=True)


def check_site(folder: Path, text: str) -> str:
    """What `nginx -t` says to this site; empty if it takes it without a warning."""
    command = write_site(folder, free_port(), free_port(), text=text)
    check = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    return check.stderr if check.returncode or "[warn]" in check.stderr else ""


@contextmanager
def start_nginx(folder: Path, upstream: str, text: str | None = None) -> Iterator[Nginx]:
    """The real nginx with our site in front of `upstream`, as nginx's `server` names it.

    `text`: a changed site, as `site` or `two_gateways` makes it.
    """
    port, tls_port = free_port(), free_port()
    command = write_site(folder, port, tls_port, upstream, text)
    with running(Process("nginx", command, folder / "nginx.log")) as process:
        process.wait_until(lambda: answers(port, "/metrics") == 403, 20, "listening")
        yield Nginx(process, folder, port, tls_port, Path(upstream.removeprefix("unix:")))
