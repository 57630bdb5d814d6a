"""When does a stream get small memory of its own, instead of what another one has just freed?

Passing a block on costs questions to the driver and tens of microseconds, at each request; a page that streams need not
share costs about a hundred of such requests, once.  So it is the question of whoever hires: *buy when the hire paid so
far comes to the price*.  Then never more than twice the best is paid, whatever the program does next.

Rules: only small requests, whose pages are nothing beside what there is; never more than `Config.apart_bytes` in all,
nor than an eighth of a limit.  Under the pool's lock; no driver call.  Next: ladder.py, which asks.
"""

from __future__ import annotations

from typing import Final

HIRES: Final = 64
"""Requests served by what another stream freed, for each page bought."""
OF_LIMIT: Final = 8
"""No more than this part of a limit."""


class Apart:
    """The account of one pool.  most: bytes bought at most.  page: bytes of one purchase."""

    __slots__ = ("_hired", "_most", "_page", "bought")

    def __init__(self, most: int, page: int) -> None:
        self._most = most
        self._page = page
        self._hired = 0
        self.bought = 0
        """Bytes bought, of those that are held now."""

    def hired(self) -> None:
        """A small request was served, past the bins, by what others had freed, the stream's own mixed in or not."""
        self._hired += 1

    def pays(self, limit: int, reserved: int) -> bool:
        """Is it time to buy a page?  limit: the pool's, in bytes; 0 for none.  reserved: what it holds now."""
        if self._hired < HIRES:
            return False
        self.bought = min(self.bought, reserved)  # what has gone back to the driver may be bought again
        most = min(self._most, limit // OF_LIMIT) if limit else self._most
        return self.bought + self._page <= most

    def buy(self) -> None:
        """A page is on its way."""
        self._hired = 0
        self.bought += self._page

    def refused(self) -> None:
        """It could not be had."""
        self.bought -= self._page
