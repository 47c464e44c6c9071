"""Hosts that media may be fetched from are looked at before anything starts."""

import pytest

from gateway.settings import Settings
from gateway.settings_check import check_together
from gateway.settings_media import Media, check_media


@pytest.mark.parametrize(
    "domain", ["*", "images.example.com", "localhost", "*.example.com", "example.com:8443"]
)
def test_hosts_are_taken(domain: str) -> None:
    assert not list(check_media(Media(allowed_media_domains=(domain,))))


@pytest.mark.parametrize(
    "domain", ["https://images.example.com", "example.com/", ".com", "10.0.0.1", "a" * 300]
)
def test_what_is_no_host_is_a_problem(domain: str) -> None:
    problems = list(check_together(Settings(media=Media(allowed_media_domains=("example.com", domain)))))
    assert len(problems) == 1
    assert problems[0].startswith(f"allowed_media_domains: '{domain[:80]}' is no ")
