"""`weir dashboard`: prints what Grafana and Prometheus need to watch a pool.

Next: allocator/metrics/dashboards, where the files lie; docs/metrics.md says how to use them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from allocator.cli.status import OK

_DESCRIPTION: Final = """\
Print a file that shows and watches the metrics of a pool.

  grafana   a dashboard as JSON, for Grafana 10 and newer: Dashboards, New, Import
  alerts    recording rules and alerts as YAML, for rule_files in prometheus.yml

The pool's side is allocator.metrics.register(pool); docs/metrics.md has the rest.
"""

_EPILOG: Final = """\
examples:
  weir dashboard grafana > weir.json
  weir dashboard alerts --output /etc/prometheus/weir-rules.yml
  promtool check rules weir-rules.yml
"""

_FILES: Final = ("grafana", "alerts")


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "dashboard",
        help="print a Grafana dashboard, or Prometheus alert and recording rules",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=_FILES, help="which file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of to standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the file, or write it.  OSError if it cannot be written."""
    from allocator.metrics import grafana_dashboard, prometheus_rules  # the other commands do without

    text = grafana_dashboard() if arguments.what == "grafana" else prometheus_rules()
    if arguments.output is None:
        sys.stdout.write(text)
        return OK
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"cannot write {arguments.output}: {error.strerror or error}") from error
    print(f"written to {arguments.output}", file=sys.stderr)
    return OK
