"""Who may ask for what.

Rules:

* A server on the loopback interface trusts the machine's users, not the pages that their browsers show.  A page of
  another site must neither read from it nor make it work: its requests carry another `Origin`, or say that they are
  cross-site; and where its own name has been pointed at 127.0.0.1 (DNS rebinding), another `Host`.
* Any other address needs a token, for everything but `/metrics` and `/healthz`.  It is compared in constant time.
* A token in the address bar is taken out of it: it becomes a cookie that scripts cannot read and other sites cannot
  send.  The cookie holds a digest of the token, not the token.

Pure: what is known of a request goes in, a verdict comes out.  Next: app.py, which acts on it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlencode, urlsplit

OPEN: Final = ("/metrics", "/healthz")
"""Paths that never need the token."""

SHORTEST_TOKEN: Final = 8


@dataclass(frozen=True)
class Verdict:
    """The answer instead of what was asked for: a refusal, or a welcome that sets a cookie."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


def is_loopback(address: str) -> bool:
    """Does this address, as text, belong to the loopback interface?

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("name")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_token(token: str | None) -> None:
    """ValueError for a token that cannot be sent, or that is too easy to guess."""
    if token is None:
        return
    if not isinstance(token, str):
        raise TypeError(f"token must be text, not {type(token).__name__}")
    if len(token) < SHORTEST_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise ValueError(
            f"token must be at least {SHORTEST_TOKEN} letters, digits or signs without spaces: "
            'python -c "import secrets; print(secrets.token_urlsafe())" makes a good one'
        )


class Access:
    """The rules for one server: its token, its port, and whether it listens on loopback addresses only."""

    def __init__(self, token: str | None, port: int, *, loopback: bool) -> None:
        check_token(token)
        self._token = None if token is None else token.encode()
        self._loopback = loopback
        self._cookie = f"weir_{port}"  # cookies do not tell ports apart
        self._digest = "" if token is None else hmac.new(token.encode(), b"weir cookie", hashlib.sha256).hexdigest()

    def judge(
        self, method: str, path: str, query: Mapping[str, Sequence[bytes]], headers: Mapping[str, str]
    ) -> Verdict | None:
        """None: go ahead.  query: decoded values by name.  headers: of any capitalisation, looked up as written."""
        if method not in ("GET", "HEAD"):
            return Verdict(
                405, f"{method} is not for this server; it only answers GET and HEAD", {"Allow": "GET, HEAD"}
            )
        bearer = self._is_bearer(headers)
        # No page can make a browser send that header to us, so whoever does may be a proxy under any name.
        if not bearer and (refusal := self._judge_site(headers)) is not None:
            return refusal
        given = query.get("token", ())
        known = bearer or self._has_cookie(headers)
        if self._token is not None and given and path not in OPEN:
            if not any(hmac.compare_digest(value, self._token) for value in given):
                return self._ask("that is not the token")
            return self._welcome(path, query, headers)
        if self._token is not None and not known and path not in OPEN:
            return self._ask("this needs the server's token")
        if self._loopback and not known:  # whoever knows the token was sent by nobody
            return self._judge_host(headers)
        return None

    def _is_bearer(self, headers: Mapping[str, str]) -> bool:
        scheme, _, value = headers.get("Authorization", "").partition(" ")
        given = _bytes(value.strip())
        return self._token is not None and scheme.lower() == "bearer" and hmac.compare_digest(given, self._token)

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        if self._token is None:
            return False
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("Cookie", ""))
        except CookieError:
            return False
        cookie = cookies.get(self._cookie)
        return cookie is not None and hmac.compare_digest(_bytes(cookie.value), _bytes(self._digest))

    def _ask(self, why: str) -> Verdict:
        text = f"{why}: open http://.../?token=TOKEN, or send the header Authorization: Bearer TOKEN"
        return Verdict(401, text, {"WWW-Authenticate": 'Bearer realm="weir"'})

    def _welcome(self, path: str, query: Mapping[str, Sequence[bytes]], headers: Mapping[str, str]) -> Verdict:
        """The same address without the token, which stays behind as a cookie."""
        rest = [(name, value) for name, values in query.items() if name != "token" for value in values]
        place = path + (f"?{urlencode(rest)}" if rest else "")
        set_cookie = {"Set-Cookie": f"{self._cookie}={self._digest}; Path=/; HttpOnly; SameSite=Strict"}
        if headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
            return Verdict(303, f"go on at {place}", {**set_cookie, "Location": place})
        # A strict cookie is not sent along a redirect that another site began, so the page asks by itself.
        return Verdict(200, "welcome", {**set_cookie, "Refresh": f"0; url={place}"})

    def _judge_host(self, headers: Mapping[str, str]) -> Verdict | None:
        host = headers.get("Host")
        if host is None:
            return None  # no browser leaves it out
        name = _host_name(host)
        if name == "localhost" or name.endswith(".localhost") or is_loopback(name):
            return None
        return Verdict(
            403, f"this server is for localhost, not for {_printable(host)}; serve(token=...) opens it to others"
        )

    def _judge_site(self, headers: Mapping[str, str]) -> Verdict | None:
        origin = headers.get("Origin")
        if origin is not None:
            try:
                place = urlsplit(origin).netloc.lower()
            except ValueError:
                place = ""
            if not place or place != headers.get("Host", "").lower():
                return Verdict(403, f"pages of {_printable(origin)} may not read from this server")
        site = headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and headers.get("Sec-Fetch-Mode") != "navigate":
            return Verdict(403, "pages of other sites may not read from this server")
        return None


def _host_name(host: str) -> str:
    """The name in a `Host` header, without port, brackets and final dot.

    >>> _host_name("LocalHost.:80"), _host_name("[::1]:9478"), _host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].rstrip(".").lower() if ":" in host else host.rstrip(".").lower()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
