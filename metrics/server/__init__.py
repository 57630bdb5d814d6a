"""The HTTP server of a pool: metrics, live page, health and snapshot on one port.

Rules:

* Serving costs the program nothing but its share of the interpreter: own thread, own event loop, no lock of a pool
  held while anything is sent, and however many ask, one reads the pools at a time, with pauses in between.
* Whoever asks is a stranger until access.py says otherwise, and a bad client costs one connection (connections.py).
* The live page is what `allocator.metrics.page` draws; nothing here knows what is on it.

Next: serving.py (`serve`, `Server`), then app.py (what answers what), readings.py (who reads the pools, and when).
For people: docs/metrics.md.
"""

from __future__ import annotations

from allocator.metrics.server.serving import Server, serve

__all__ = ["Server", "serve"]
