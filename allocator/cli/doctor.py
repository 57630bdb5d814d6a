"""`weir doctor`: what is installed, what the GPUs can do, which settings apply, and what to do about the rest.

Next: examination.py, which looks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from allocator.cli.examination import MISSING, NOTE, OK, WRONG, Finding, examine
from allocator.cli.status import MISMATCH
from allocator.cli.status import OK as WELL

_DESCRIPTION: Final = """\
Say, in one sentence a line, what is installed, what the GPUs can do, which settings
apply, and what is missing and how to get it. Works without a GPU, and without a driver.
On each GPU one small allocation is made and given back.
"""

_EPILOG: Final = """\
marks:
  ok  as it should be          --  not installed, and not needed for what is
  ..  good to know             !!  to be put right; the line says how

exit status:
  0  Weir works here; without any GPU, with the simulator, and a line says so
  1  something is to be put right: a broken installation, a GPU that is there and
     cannot be used, a wrong or unknown WEIR_ setting
"""

MARKS: Final = {OK: "ok", NOTE: "..", MISSING: "--", WRONG: "!!"}
TITLES: Final = {"installed": "Installed", "gpu": "GPUs", "settings": "Settings", "check": "Checks"}


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what the GPUs can do, and what to put right",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine and tell; returns the exit status."""
    found = examine()
    wrong = sum(finding.state == WRONG for finding in found)
    print(as_json(found) if arguments.json else as_text(found))
    return MISMATCH if wrong else WELL


def served(found: Sequence[Finding]) -> list[str]:
    """The GPUs on which an allocation worked."""
    return [f.name for f in found if f.topic == "check" and f.state == OK and f.name.startswith("GPU ")]


def verdict(found: Sequence[Finding]) -> str:
    """All of it in one sentence."""
    wrong = sum(finding.state == WRONG for finding in found)
    if wrong:
        return f"{wrong} thing{'s' if wrong > 1 else ''} to put right, marked !! above."
    names = served(found)
    return f"Weir works on {', '.join(names)}." if names else "Weir works here with the simulator; there is no GPU."


def as_text(found: Sequence[Finding]) -> str:
    """A sentence a line, under a title each topic."""
    lines: list[str] = []
    for topic, title in TITLES.items():
        lines += [title, *(f"  {MARKS[f.state]}  {f.text}" for f in found if f.topic == topic), ""]
    return "\n".join([*lines, verdict(found)])


def as_json(found: Sequence[Finding]) -> str:
    """ok, gpus (those that work), verdict, and the findings as they are."""
    answer = {
        "ok": all(finding.state != WRONG for finding in found),
        "gpus": served(found),
        "verdict": verdict(found),
        "findings": [asdict(finding) for finding in found],
    }
    return json.dumps(answer, indent=1)
