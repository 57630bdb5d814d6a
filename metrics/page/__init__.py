"""The live page: a `History`, shown in a browser, one Bokeh document a visitor.

Rule: importing this needs no Bokeh; `make_document` does, and says so in one line where it is missing.
Why Bokeh: docs/decisions/0015-live-page.md.  Next: document.py; docs/metrics.md for people.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.errors import AllocatorError

if TYPE_CHECKING:
    from bokeh.document import Document

    from allocator.metrics.history import History

__all__ = ["make_document"]

MISSING = 'the live page needs Bokeh: pip install "weir-allocator[dashboard]"'


def make_document(doc: Document, history: History) -> None:
    """Fill an empty document with the page: what a Bokeh application does for each visitor.

    The page is brought up to date after each sample, for as long as its session lives; while it does, the history is
    watched.  Raises AllocatorError where Bokeh is missing.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise AllocatorError(MISSING) from None
    from allocator.metrics.page.document import Page

    Page(doc, history).open()
