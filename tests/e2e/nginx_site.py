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

from benchmarks import nginx_site
from benchmarks.nginx_site import SITE, replaced
from tests.components import need
from tests.processes import ROOT, Process, answers, free_port
from tests.stack import running

TWO_GATEWAYS: Final = ROOT / "nginx" / "two-gateways.conf"
HTTP3: Final = ROOT / "nginx" / "http3.conf"


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
        return nginx_site.tls_context(self.folder, protocol)


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


def command_for(
    folder: Path, port: int, tls_port: int, upstream: str = "127.0.0.1:8000", text: str | None = None
) -> list[str]:
    """Writes the site, as `benchmarks.nginx_site.write_site` does; the command that runs nginx with it."""
    need("openssl")
    return [need("nginx"), *nginx_site.write_site(folder, port, tls_port, upstream, text)]


def check_site(folder: Path, text: str) -> str:
    """What `nginx -t` says to this site; empty if it takes it without a warning."""
    command = command_for(folder, free_port(), free_port(), text=text)
    check = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    return check.stderr if check.returncode or "[warn]" in check.stderr else ""


@contextmanager
def start_nginx(folder: Path, upstream: str, text: str | None = None) -> Iterator[Nginx]:
    """The real nginx with our site in front of `upstream`, as nginx's `server` names it.

    `text`: a changed site, as `site` or `two_gateways` makes it.
    """
    port, tls_port = free_port(), free_port()
    command = command_for(folder, port, tls_port, upstream, text)
    with running(Process("nginx", command, folder / "nginx.log")) as process:
        process.wait_until(lambda: answers(port, "/metrics") == 403, 20, "listening")
        yield Nginx(process, folder, port, tls_port, Path(upstream.removeprefix("unix:")))
