"""A Chromium that says what it sees."""

from __future__ import annotations

import time
from typing import Any

PATIENCE_S = 90


class Browser:
    """A Chromium that says what it sees.  Conditions are waited for, never times."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1400, height: int = 2200, dark: bool = False) -> None:
        """Load a page, and wait until everything on it is drawn once."""
        self.size(width, height)
        self.prefer("dark" if dark else "light")
        self.driver.get_log("browser")
        self.driver.get(url)
        self.until("return document.documentElement.dataset.ready === 'yes'")

    def leave(self) -> None:
        """Leave the page."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """The first true answer of a script."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.ask(script, *arguments)):
            assert time.monotonic() < deadline, f"never true: {script}"
        return found

    def column(self, source: str, name: str) -> list[Any]:
        """A column of a data source, as the browser has it."""
        found = self.ask(
            "return Array.from(Bokeh.documents[0].get_model_by_name(arguments[0]).data[arguments[1]], "
            "(x) => typeof x === 'number' && !isFinite(x) ? null : x)",
            source,
            name,
        )
        assert isinstance(found, list)
        return found

    def complaints(self) -> list[str]:
        """What the console has that is no plain information."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
