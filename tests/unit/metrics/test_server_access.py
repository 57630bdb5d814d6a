"""Who may ask for what: tokens, hosts, origins; and a server's choice of pools."""

from __future__ import annotations

import gc
import logging

import pytest

from allocator import CachingAllocator, Config, SimDevice
from allocator.metrics.server.access import Access, Verdict, check_token, is_loopback
from allocator.metrics.server.sources import Pools

TOKEN = "correct-horse-battery"
LOCAL = {"Host": "127.0.0.1:9478"}
AWAY = {"Host": "node7.cluster:9478"}


def judge(
    access: Access, path: str = "/", headers: dict[str, str] = LOCAL, method: str = "GET", **query: str
) -> Verdict | None:
    return access.judge(method, path, {name: [value.encode()] for name, value in query.items()}, headers)


@pytest.fixture
def local() -> Access:
    return Access(None, 9478, loopback=True)


@pytest.fixture
def open_to_all() -> Access:
    return Access(TOKEN, 9478, loopback=False)


# -- loopback ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9478", "localhost:8000", "LOCALHOST", "localhost.:80", "[::1]:9478", "127.8.9.1", "a.localhost"]
)
def test_a_loopback_server_answers_to_the_machines_own_names(local: Access, host: str) -> None:
    assert judge(local, headers={"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:9478",
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[::2]",
        "192.168.0.7",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/ws"])
def test_a_name_that_was_pointed_at_loopback_is_refused_everywhere(local: Access, host: str, path: str) -> None:
    verdict = judge(local, path, {"Host": host})
    assert verdict is not None
    assert verdict.status == 403


def test_a_client_without_a_host_is_no_browser(local: Access) -> None:
    assert judge(local, headers={}) is None


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:9478", "http://127.0.0.1:1", "null", "http://[", "127.0.0.1:9478"],
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/ws"])
def test_a_page_of_another_origin_reads_nothing(local: Access, origin: str, path: str) -> None:
    verdict = judge(local, path, {**LOCAL, "Origin": origin})
    assert verdict is not None
    assert verdict.status == 403


def test_the_page_itself_may_read(local: Access) -> None:
    own = {**LOCAL, "Origin": "http://127.0.0.1:9478", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert judge(local, "/ws", own) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_image_or_script_of_another_site_is_refused_and_a_link_is_not(local: Access, site: str) -> None:
    image = judge(local, headers={**LOCAL, "Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
    assert image is not None
    assert image.status == 403
    assert judge(local, headers={**LOCAL, "Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", ""])
def test_only_reading_is_allowed(local: Access, method: str) -> None:
    verdict = judge(local, method=method)
    assert verdict is not None
    assert (verdict.status, verdict.headers["Allow"]) == (405, "GET, HEAD")
    assert judge(local, method="HEAD") is None


def test_text_of_a_stranger_is_made_printable_and_short(local: Access) -> None:
    verdict = judge(local, headers={"Host": "\x1b[31m" + "x" * 1000})
    assert verdict is not None
    assert "\x1b" not in verdict.text
    assert len(verdict.text) < 200


# -- tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ws", "/snapshot", "/static/js/bokeh.min.js", ""])
def test_without_the_token_there_is_nothing_but_metrics_and_health(open_to_all: Access, path: str) -> None:
    verdict = judge(open_to_all, path, AWAY)
    assert verdict is not None
    assert verdict.status == 401
    assert TOKEN not in verdict.text
    assert judge(open_to_all, "/metrics", AWAY) is None
    assert judge(open_to_all, "/healthz", AWAY) is None


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "])
def test_the_token_as_a_header_opens(open_to_all: Access, value: str) -> None:
    assert judge(open_to_all, "/snapshot", {**AWAY, "Authorization": value}) is None


@pytest.mark.parametrize(
    "value", ["Bearer wrong-token", "Bearer", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer é"]
)
def test_another_header_does_not(open_to_all: Access, value: str) -> None:
    verdict = judge(open_to_all, "/snapshot", {**AWAY, "Authorization": value})
    assert verdict is not None
    assert verdict.status == 401


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(open_to_all: Access) -> None:
    verdict = judge(open_to_all, "/snapshot", AWAY, token=TOKEN, pool="a b")
    assert verdict is not None
    assert (verdict.status, verdict.headers["Location"]) == (303, "/snapshot?pool=a+b")
    cookie = verdict.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert judge(open_to_all, "/ws", {**AWAY, "Cookie": f"other=1; {cookie.partition(';')[0]}"}) is None


def test_a_proxy_that_sends_the_token_may_have_another_name(open_to_all: Access) -> None:
    proxied = {"Host": "127.0.0.1:9478", "Origin": "https://dash.example", "Authorization": f"Bearer {TOKEN}"}
    assert judge(open_to_all, "/ws", proxied) is None
    welcome = judge(open_to_all, "/", AWAY, token=TOKEN)
    assert welcome is not None
    cookie = welcome.headers["Set-Cookie"].partition(";")[0]
    del proxied["Authorization"]
    refused = judge(open_to_all, "/ws", {**proxied, "Cookie": cookie})
    assert refused is not None
    assert refused.status == 403


def test_a_link_from_another_site_goes_on_by_itself_as_the_cookie_is_strict(open_to_all: Access) -> None:
    link = {**AWAY, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    verdict = judge(open_to_all, "/", link, token=TOKEN)
    assert verdict is not None
    assert (verdict.status, verdict.headers["Refresh"]) == (200, "0; url=/")


def test_a_wrong_token_in_the_address_sets_nothing(open_to_all: Access) -> None:
    verdict = judge(open_to_all, "/", AWAY, token="correct-horse-batterx")
    assert verdict is not None
    assert verdict.status == 401
    assert "Set-Cookie" not in verdict.headers


@pytest.mark.parametrize("cookie", [f"weir_9478={TOKEN}", "weir_9478=", "weir_1=x", "=;;=", 'weir_9478="\\777'])
def test_another_cookie_does_not_open(open_to_all: Access, cookie: str) -> None:
    verdict = judge(open_to_all, "/", {**AWAY, "Cookie": cookie})
    assert verdict is not None
    assert verdict.status == 401


def test_a_cookie_is_of_one_token_only(open_to_all: Access) -> None:
    welcome = judge(open_to_all, "/", AWAY, token=TOKEN)
    assert welcome is not None
    cookie = welcome.headers["Set-Cookie"].partition(";")[0]
    other = judge(Access("another-token-of-theirs", 9478, loopback=False), "/", {**AWAY, "Cookie": cookie})
    assert other is not None
    assert other.status == 401


def test_a_token_also_guards_loopback_and_opens_it_under_any_name() -> None:
    access = Access(TOKEN, 9478, loopback=True)
    assert judge(access, "/") is not None
    assert judge(access, "/metrics") is None
    assert judge(access, "/metrics", AWAY) is not None  # it still could be a rebound name
    assert judge(access, "/snapshot", {**AWAY, "Authorization": f"Bearer {TOKEN}"}) is None


@pytest.mark.parametrize("token", ["", "short", "with space in it", "newline\nin-it", "ümlauts-are-out"])
def test_a_token_that_cannot_be_sent_or_is_easily_guessed_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token must be at least 8"):
        check_token(token)
    check_token(None)
    check_token(TOKEN)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("::1", True), ("::1%lo", True), ("0.0.0.0", False), ("10.0.0.1", False), ("x", False)],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


# -- which pools ------------------------------------------------------------------------------------


def make(name: str, gpu: SimDevice) -> CachingAllocator:
    return CachingAllocator(gpu, config=Config(), name=name)


def test_a_pool_is_not_kept_alive_and_a_closed_one_is_gone(gpu: SimDevice) -> None:
    one, two = make("one", gpu), make("two", gpu)
    pools = Pools([one, two, one])
    assert pools() == [one, two]
    one.close()
    assert pools() == [two]
    assert pools.gone() is None
    del two
    gc.collect()
    assert pools() == []
    assert pools.gone() == "all pools have been closed: 'one', 'two', 'one'"


def test_one_pool_that_is_closed_is_named(gpu: SimDevice) -> None:
    pool = make("train", gpu)
    pools = Pools(pool)
    assert pools.gone() is None
    pool.close()
    assert pools.gone() == "pool 'train' has been closed"


def test_a_callable_is_asked_each_time(gpu: SimDevice) -> None:
    current: list[CachingAllocator] = []
    pools = Pools(lambda: current)
    assert (pools(), pools.gone()) == ([], None)
    current.append(make("late", gpu))
    assert pools() == current


def test_a_callable_that_fails_names_none_and_is_logged_once(gpu: SimDevice, caplog: pytest.LogCaptureFixture) -> None:
    wrong: list[object] = ["no pool"]
    pools = Pools(lambda: wrong)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.WARNING, "allocator.metrics"):
        assert pools() == pools() == []
        assert len(caplog.records) == 1
        wrong.clear()
        assert pools() == []
        wrong.append(7)
        assert pools() == []
    assert [record.message for record in caplog.records] == [
        "the pools to serve could not be found out, so none is shown: pools are CachingAllocators, not str",
        "the pools to serve could not be found out, so none is shown: pools are CachingAllocators, not int",
    ]


def test_pools_of_one_name_are_told_apart(gpu: SimDevice) -> None:
    one, two, three = (make("a", gpu) for _ in range(3))
    assert Pools([one, two, three]).by_name() == {"a": one, "a#2": two, "a#3": three}


@pytest.mark.parametrize("wrong", [7, None, ["x"], object()])
def test_what_is_no_pool_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError):
        Pools(wrong)  # type: ignore[arg-type]
