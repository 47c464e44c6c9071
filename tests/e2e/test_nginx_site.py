"""What the files in `nginx/` say: each passes nginx's own check, and every limit is the gateway's.

How requests and streams fare is in `test_nginx_requests.py` and `test_nginx.py`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.components import need
from tests.e2e.nginx_conf import Directive, num_bytes, num_seconds, parse
from tests.e2e.nginx_site import HTTP3, SITE, TWO_GATEWAYS, behind_balancer, check_site, site, two_gateways
from tests.processes import ROOT

HTTP = Settings().http
LIMITS = Settings().limits
HTTP3_INCLUDE = "# include /etc/nginx/headrace-http3.conf;"


def the_server() -> Directive:
    (server,) = parse(site()).all("server")
    return server


def upstream(text: str) -> Directive:
    (found,) = parse(text).all("upstream")
    return found


def with_http3(lines: list[str]) -> str:
    """The site with these lines of http3.conf in the place of their include."""
    assert "\nlisten 443 quic reuseport;\n" in HTTP3.read_text()
    return site({HTTP3_INCLUDE: "\n".join(lines)})


def test_every_file_is_of_a_known_kind() -> None:
    """The checks below know what goes where; a new file needs one."""
    assert sorted((ROOT / "nginx").iterdir()) == sorted([SITE, TWO_GATEWAYS, HTTP3])


@pytest.mark.parametrize(
    "text",
    [site(), two_gateways("127.0.0.1:8001", "unix:/run/headrace.sock"), behind_balancer("10.0.0.0/8")],
    ids=["site", "two_gateways", "behind_balancer"],
)
def test_site_passes_the_check_of_nginx(tmp_path: Path, text: str) -> None:
    assert not check_site(tmp_path, text)


def test_http3_passes_the_check_of_nginx(tmp_path: Path) -> None:
    """Whole where this nginx has HTTP/3; else without the lines that only such an nginx knows."""
    version = subprocess.run([need("nginx"), "-V"], capture_output=True, text=True, check=True)
    lines = HTTP3.read_text().splitlines()
    if "http_v3_module" not in version.stdout + version.stderr:
        names = ("listen 443 quic", "http3 on", "http3_max_concurrent_streams")
        lines = [line for line in lines if not line.startswith(names)]
        assert [line for line in lines if line and not line.startswith("#")] == [
            "add_header Alt-Svc 'h3=\":443\"; ma=86400' always;"
        ]
    assert not check_site(tmp_path, with_http3(lines))


def test_bounds_of_a_request_are_the_gateways() -> None:
    server = the_server()
    assert num_bytes(server.value("client_max_body_size")) == HTTP.max_body_bytes
    num, size = server.value("large_client_header_buffers").split()
    assert num_bytes(size) == HTTP.max_header_bytes
    assert int(num) > 1, (
        "over HTTP/2 more than all of them ends the connection: that is for the gateway to refuse"
    )
    assert num_seconds(server.value("client_header_timeout")) == HTTP.header_limit_s
    assert num_seconds(server.value("client_body_timeout")) == HTTP.body_limit_s


def test_bounds_in_messages_are_the_gateways() -> None:
    (messages,) = [each for each in parse(site()).all("map") if each.args[1] == "$headrace_error"]
    assert f"larger than {HTTP.max_body_bytes} bytes" in messages.value("413")
    assert f"larger than {HTTP.max_header_bytes} bytes" in messages.value("431")


def test_bound_of_a_slow_reader_is_the_gateways() -> None:
    assert num_seconds(the_server().value("send_timeout")) == LIMITS.slow_reader_s


@pytest.mark.parametrize("text", [site(), TWO_GATEWAYS.read_text()], ids=["site", "two_gateways"])
def test_nginx_closes_idle_connections_before_the_gateway(text: str) -> None:
    assert num_seconds(upstream(text).value("keepalive_timeout")) < HTTP.keep_alive_s
    assert int(upstream(text).value("keepalive")) > 0


def test_nginx_waits_longer_than_the_gateway() -> None:
    server = the_server()
    assert num_seconds(server.value("proxy_read_timeout")) > LIMITS.request_limit_s
    assert num_seconds(server.value("proxy_send_timeout")) >= HTTP.body_limit_s


def test_example_of_an_address_is_the_gateways_default() -> None:
    assert upstream(site()).value("server") == f"{HTTP.host}:{HTTP.port}"


def test_nothing_is_buffered_compressed_cached_or_repeated() -> None:
    """For the whole server, and no location says otherwise."""
    server = the_server()
    wanted = {
        "proxy_buffering": "off",
        "proxy_cache": "off",
        "proxy_next_upstream": "off",
        "proxy_ignore_client_abort": "off",
        "proxy_intercept_errors": "off",
        "proxy_request_buffering": "on",
        "proxy_http_version": "1.1",
        "gzip": "off",
        "tcp_nodelay": "on",
        "ssl_early_data": "off",
    }
    assert {name: server.value(name) for name in wanted} == wanted
    inside = [each for location in server.all("location") for each in location.everywhere()]
    assert not [each for each in inside if each.name in wanted]


def test_repeating_with_two_gateways_spares_what_generates() -> None:
    (server,) = parse(two_gateways("127.0.0.1:8001", "127.0.0.1:8002")).all("server")
    assert server.value("proxy_next_upstream") == "error timeout"
