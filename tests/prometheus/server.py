"""A Prometheus of our own: started on loopback, asked over HTTP, stopped again."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

INTERVAL: Final = "400ms"
"""Between two scrapes, and between two evaluations of the rules."""

PATIENCE_S: Final = 150.0

Vector = dict[frozenset[tuple[str, str]], float]
"""The answer to an instant query: labels without the name -> value."""


def until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    """Ask again until it is so; AssertionError with what is missing in the end."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"never: {what()}"
        time.sleep(0.1)  # another process is asked, which tells nobody when it is ready


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """One server.  targets: job -> address to scrape.  rules: the text of a rules file."""

    def __init__(self, folder: Path, targets: dict[str, str], rules: str) -> None:
        (folder / "rules.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [
                {"job_name": job, "scrape_timeout": INTERVAL, "static_configs": [{"targets": [address]}]}
                for job, address in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "log.txt"
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def wait_until_ready(self) -> None:
        """AssertionError, with what it said, if it ends instead."""

        def ready() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        until(ready, lambda: f"Prometheus is ready: {self._log.read_text()}")

    def stop(self) -> None:
        """End it, and wait."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            body = json.load(answer)
        assert body["status"] == "success" and not body.get("warnings"), body
        return body["data"]

    def ask(self, expression: str, at: float | None = None) -> Vector:
        """An instant query.  at: seconds since 1970; None for now."""
        moment = {} if at is None else {"time": repr(at)}
        data = self.get("query", query=expression, **moment)
        assert data["resultType"] == "vector", data
        found = {}
        for one in data["result"]:
            labels = frozenset((name, text) for name, text in one["metric"].items() if name != "__name__")
            found[labels] = float(one["value"][1])
        assert len(found) == len(data["result"])
        return found

    def firing(self) -> list[dict[str, Any]]:
        """The alerts that fire now."""
        return [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]
