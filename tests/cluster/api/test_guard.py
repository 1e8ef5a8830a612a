"""What comes from another page's script is refused, whatever it asks for."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from gyrostat.cluster.api.guard import check_origin
from gyrostat.cluster.api.problem import ApiError
from gyrostat.cluster.api.server import ApiServer, check_listen, parse_listen
from gyrostat.core.errors import UsageError
from tests.cluster.quiet_cluster import Quiet

OURS = ("localhost", "127.0.0.1", "[::1]")


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:7460"},
        {"host": "localhost"},
        {"host": "LocalHost:7460"},
        {"host": "[::1]:7460"},
        {"host": "localhost:7460", "origin": "http://localhost:7460", "sec-fetch-site": "same-origin"},
        {"host": "localhost:7460", "sec-fetch-site": "none"},
    ],
)
def test_requests_for_us_pass(headers: dict[str, str]) -> None:
    check_origin(headers, OURS)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 421),
        ({"host": "evil.example:7460"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost:7460", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:7460", "origin": "null"}, 403),
        ({"host": "localhost:7460", "origin": "http://localhost:8080"}, 403),
        ({"host": "localhost:7460", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "localhost:7460", "sec-fetch-site": "same-site"}, 403),
    ],
)
def test_requests_that_pages_make_do_not(headers: dict[str, str], status: int) -> None:
    with pytest.raises(ApiError) as refused:
        check_origin(headers, OURS)
    assert refused.value.status == status


def test_with_tokens_any_name_will_do() -> None:
    check_origin({"host": "cluster.example:7460"}, None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example", "Content-Type": "application/json"}, 421),
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
    ],
)
def test_a_page_cannot_submit(server: ApiServer, quiet: Quiet, headers: dict[str, str], status: int) -> None:
    connection = http.client.HTTPConnection(server.address)
    connection.request("POST", "/v1/jobs", b'{"script": "train.py"}', headers)
    assert connection.getresponse().status == status
    connection.close()
    assert quiet.service.jobs(None) == []


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "192.168.0.1", "2001:db8::1"])
def test_other_addresses_need_tokens(address: str) -> None:
    with pytest.raises(
        UsageError, match=r"needs tokens: make some with `gyrostat token add`, and give --tokens FILE"
    ):
        check_listen(address, None)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_needs_none(address: str) -> None:
    assert check_listen(address, None) is None


def test_the_service_does_not_start_without_tokens(quiet: Quiet) -> None:
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 can be reached from other machines"):
        ApiServer(quiet.service, "0.0.0.0:0")
    with pytest.raises(UsageError, match=r"token file .* cannot be read"):
        ApiServer(quiet.service, "0.0.0.0:0", Path("nosuch.json"))


def test_an_address_in_use_is_an_error(quiet: Quiet, server: ApiServer) -> None:
    with pytest.raises(UsageError, match=r"cannot listen at 127.0.0.1:.*: Address already in use"):
        ApiServer(quiet.service, server.address)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:7460", ("127.0.0.1", 7460)),
        (":0", ("127.0.0.1", 0)),
        ("7460", ("127.0.0.1", 7460)),
        ("[::1]:7460", ("::1", 7460)),
        ("node7:1", ("node7", 1)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed


@pytest.mark.parametrize("text", ["", "localhost", "localhost:x", "localhost:70000", "::1:80", "a:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="--listen takes HOST:PORT"):
        parse_listen(text)
