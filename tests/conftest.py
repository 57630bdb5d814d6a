"""What all tests share: how Hypothesis runs, and that Ctrl-C is heard.

No deadlines: they measure the machine, not the code.  In CI the examples are the same every time.
A shell that runs the tests in the background starts them with SIGINT ignored, and every command that they start would
inherit that: it could not be interrupted.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
