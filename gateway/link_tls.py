"""TLS of the link, from the settings: what a gateway expects of a worker, and the other way round."""

from __future__ import annotations

import ssl

from gateway.settings import Link


def client_tls(link: Link) -> ssl.SSLContext | None:
    """A gateway's side; None without `link_cafile`. Raises `OSError` for files that cannot be used."""
    if link.link_cafile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(link.link_cafile))
    if link.link_certfile is not None:
        context.load_cert_chain(link.link_certfile, link.link_keyfile)
    return context


def server_tls(link: Link) -> ssl.SSLContext | None:
    """A worker's side; None without `link_certfile`. With `link_cafile` gateways must show a certificate too.

    Raises `OSError` for files that cannot be used, `ValueError` for an authority without a certificate.
    """
    if link.link_certfile is None:
        if link.link_cafile is not None:
            raise ValueError(
                "link_cafile: a worker asks gateways for certificates over TLS only, and link_certfile, "
                "which switches that on, is missing"
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(link.link_certfile, link.link_keyfile)
    if link.link_cafile is not None:
        context.load_verify_locations(str(link.link_cafile))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
