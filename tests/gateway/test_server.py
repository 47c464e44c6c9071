import signal
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from gateway.http_client import open_connection
from gateway.listen import MAX_UNSENT_BYTES, ListenError, bind, close, reserve, url
from gateway.settings import Http
from tests.gateway.programs import Program, running, wait_until
from tests.gateway.test_supervisor import ask, stream_of

TINY = ("-m", "tests.gateway.tiny_app")


def started(program: Program) -> str:
    """The address of a tiny app, once it serves."""
    program.wait_for("started")
    return program.wait_for("listening")[0]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_without_open_requests_exits_0(sig: int) -> None:
    with running(*TINY, HEADRACE_PORT="0") as program:
        address = started(program)
        idle = open_connection(address, 10.0)
        idle.request("GET", "/")
        idle.getresponse().read()  # it stays open, and must not hold up the end
        program.signal(sig)
        assert program.exit_code() == 0, program.output
        idle.close()


def test_a_drain_answers_503_lets_streams_run_and_cuts_them_at_the_limit() -> None:
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_DRAIN_LIMIT_S="1") as program:
        address = started(program)
        connection = open_connection(address, 10.0)
        stream = stream_of(connection)
        program.signal(signal.SIGTERM)
        wait_until(lambda: ask(address, "/") == "draining")
        assert stream.readline() == b"tick\n"
        assert stream.read().splitlines()[-1] == b"cut"
        assert program.exit_code() == 0, program.output
        connection.close()


def test_a_drain_ends_when_the_last_stream_does() -> None:
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_DRAIN_LIMIT_S="600") as program:
        address = started(program)
        connection = open_connection(address, 10.0)
        stream = stream_of(connection)
        program.signal(signal.SIGTERM)
        wait_until(lambda: ask(address, "/") == "draining")
        stream.close()
        connection.close()
        assert program.exit_code() == 0, program.output


def test_a_second_signal_ends_the_process_at_once() -> None:
    with running(*TINY, HEADRACE_PORT="0", HEADRACE_DRAIN_LIMIT_S="600") as program:
        address = started(program)
        connection = open_connection(address, 10.0)
        stream_of(connection)
        program.signal(signal.SIGTERM)
        wait_until(lambda: ask(address, "/") == "draining")
        program.signal(signal.SIGTERM)
        assert program.exit_code() == 128 + signal.SIGTERM
        connection.close()


def test_an_app_that_cannot_start_exits_1() -> None:
    with running(*TINY, HEADRACE_PORT="0", TINY_APP_FAILS="1") as program:
        assert program.exit_code() == 1
        assert "started" not in program.lines


def test_it_serves_on_a_unix_socket_that_other_users_may_use(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with running(*TINY, HEADRACE_UDS=str(path)) as program:
        assert started(program) == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert ask(f"unix:{path}", "/") == "ok"


def test_it_serves_tls(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    with running(
        *TINY, HEADRACE_PORT="0", HEADRACE_SSL_CERTFILE=str(cert), HEADRACE_SSL_KEYFILE=str(key)
    ) as program:
        address = started(program)
        assert address.startswith("https://")
        connection = open_connection(address, 10.0, verify=False)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"ok"
        connection.close()
        strict = open_connection(address, 10.0)
        with pytest.raises(ssl.SSLCertVerificationError):
            strict.request("GET", "/")
        strict.close()
        assert_431_over_tls(address)


def assert_431_over_tls(address: str) -> None:
    connection = open_connection(address, 10.0, verify=False)
    connection.request("GET", "/", headers={"big": "a" * 100_000})
    response = connection.getresponse()
    assert (response.status, response.getheader("connection")) == (431, "close")
    assert b"headers_too_large" in response.read()
    connection.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for 127.0.0.1."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


def test_a_taken_port_is_told_with_its_address() -> None:
    sockets = bind(Http(port=0))
    sockets[0].listen()
    port = sockets[0].getsockname()[1]
    for take in (bind, reserve):
        with pytest.raises(ListenError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            take(Http(port=port))
    close(sockets)


def test_a_host_that_does_not_exist_is_told() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on no\.such\.host\.invalid:0: "):
        bind(Http(host="no.such.host.invalid", port=0))


def test_all_addresses_of_a_host_get_the_same_free_port() -> None:
    sockets = bind(Http(host="localhost", port=0))
    assert len({each.getsockname()[1] for each in sockets}) == 1
    close(sockets)


def test_a_dead_socket_file_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    close(bind(Http(uds=path)))
    assert path.exists()
    sockets = bind(Http(uds=path))
    sockets[0].listen()
    with pytest.raises(ListenError, match="another process listens there"):
        bind(Http(uds=path))
    close(sockets)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ListenError, match="it exists and is not a socket"):
        bind(Http(uds=file))
    assert file.read_text() == "precious"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:"),
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://localhost:"),
    ],
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, expected: str) -> None:
    sockets = bind(Http(host=host, port=0))
    assert url(Http(host=host), sockets) == f"{expected}{sockets[0].getsockname()[1]}"
    close(sockets)


def test_accepted_connections_do_not_wait_for_small_frames(tmp_path: Path) -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    sockets = bind(Http(port=0))
    assert sockets[0].proto == socket.IPPROTO_TCP
    close(sockets)


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no such bound")
def test_accepted_connections_take_little_ahead_of_a_client_that_does_not_read() -> None:
    (listening,) = bind(Http(port=0))
    listening.listen()
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            bound = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    assert bound == MAX_UNSENT_BYTES
