"""TLS of the link: both sides' contexts, proven by handshakes without sockets."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from gateway.link_tls import client_tls, server_tls
from gateway.settings import Link
from tests.components import need


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, each with a certificate for `localhost`: good.pem and bad.pem, and their keys."""
    openssl, folder = need("openssl"), tmp_path_factory.mktemp("tls")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2"]
    for name in ("good", "bad"):
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run([openssl, "req", *kind, *names, *files], check=True, capture_output=True, timeout=30)
    return folder


def link(folder: Path, cert: str | None = None, authority: str | None = None) -> Link:
    return Link(
        link_certfile=folder / f"{cert}.pem" if cert else None,
        link_keyfile=folder / f"{cert}.key" if cert else None,
        link_cafile=folder / f"{authority}.pem" if authority else None,
    )


def shake_hands(client: Link, server: Link, hostname: str = "localhost") -> None:
    """A whole handshake in memory, and a byte each way. Raises `ssl.SSLError` as a connection would."""
    client_context, server_context = client_tls(client), server_tls(server)
    assert client_context is not None
    assert server_context is not None
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client_context.wrap_bio(to_client, to_server, server_hostname=hostname)
    there = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    here.write(b"a")
    assert there.read(1) == b"a"  # the server has accepted the client's certificate by now
    there.write(b"b")
    assert here.read(1) == b"b"
    assert here.version() in ("TLSv1.2", "TLSv1.3")


def test_worker_with_an_authority_and_no_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="link_certfile"):
        server_tls(Link(link_cafile=Path("authority.pem")))


def test_without_files_there_is_no_tls() -> None:
    assert client_tls(Link()) is None
    assert server_tls(Link()) is None


def test_a_trusted_worker_is_accepted(certificates: Path) -> None:
    shake_hands(link(certificates, authority="good"), link(certificates, cert="good"))


def test_a_worker_of_another_authority_is_refused(certificates: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(link(certificates, authority="good"), link(certificates, cert="bad"))


def test_a_worker_of_another_name_is_refused(certificates: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)hostname"):
        shake_hands(link(certificates, authority="good"), link(certificates, cert="good"), "elsewhere")


def test_a_worker_with_an_authority_wants_the_gateways_certificate(certificates: Path) -> None:
    worker = link(certificates, cert="good", authority="bad")
    shake_hands(link(certificates, cert="bad", authority="good"), worker)
    for cert in (None, "good"):
        with pytest.raises(ssl.SSLError):
            shake_hands(link(certificates, cert=cert, authority="good"), worker)


def test_files_that_cannot_be_used_are_errors(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    (tmp_path / "x.key").write_text("no key")
    for broken in (link(tmp_path, authority="x"), link(tmp_path, authority="missing")):
        with pytest.raises(OSError):  # noqa: PT011 - ssl.SSLError and FileNotFoundError, which say enough
            client_tls(broken)
    for broken in (link(tmp_path, cert="x"), link(tmp_path, cert="missing")):
        with pytest.raises(OSError):  # noqa: PT011
            server_tls(broken)
