"""What the garbage collector is doing: is a collection running?

Between its first finaliser and its end, what it found dead may still be used: by the finaliser of something else in
the same cycle, and, should that put itself back among the living, for ever after (PEP 442).  So memory that comes back
while a collection runs is only *doubtful*: it is free once the collection is over and nobody else holds the object that
held it (caching/frees.py).  A library's own pool is as careful without trying: its memory objects are written in C, and
give back what they hold when they are torn down, after all finalisers.

The collector tells its callbacks of each beginning and end.  Ours is not a function of Python's: that would be where a
signal is handled, and Ctrl-C, which Python drops there, would be lost, and with it what the function was about to note.

Next: allocation.py, whose finaliser asks.
"""

from __future__ import annotations

import gc
from functools import partial
from operator import setitem
from typing import Final

RUNNING: Final[dict[object, object]] = {}
"""Not empty while a collection is under way, in some thread."""

_PHASES: Final = type(
    "_Phases",
    (),
    {"start": property(fset=partial(setitem, RUNNING)), "stop": property(fset=RUNNING.pop)},  # type: ignore[arg-type]
)
"""To set `start` puts an entry there, to set `stop` takes it away; no step of it is interpreted."""

gc.callbacks.append(partial(setattr, _PHASES()))  # called with the phase's name, and a dict
