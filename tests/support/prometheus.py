"""A client of Prometheus' HTTP API."""

import json
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a response.

    Attributes:
        labels: Its labels.
        value: Its value.
    """

    labels: dict[str, str]
    value: float


class Prometheus:
    """A Prometheus server at a base address."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Sample]:
        """Evaluates an expression now; a scalar becomes a sample without labels."""
        result = self._get("query", query=expression)
        if result["resultType"] == "scalar":
            return [Sample({}, float(result["result"][1]))]
        return [Sample(entry["metric"], float(entry["value"][1])) for entry in result["result"]]

    def value(self, expression: str) -> float | None:
        """The value of an expression with one sample; None without a sample."""
        samples = self.query(expression)
        assert len(samples) <= 1, f"{expression}: {len(samples)} samples"
        return samples[0].value if samples else None

    def increase_since(self, counter: str, before: float) -> float:
        """Increase of a counter since an earlier value."""
        return (self.value(counter) or 0.0) - before

    def scraped_after(self, seconds: float, series: str) -> bool:
        """Whether a series was scraped after a time of this machine's clock, which Prometheus shares."""
        value = self.value(f"timestamp({series})")
        return value is not None and value > seconds

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def alert_states(self) -> dict[str, str]:
        """State of each pending or firing alert, by name."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self._get("alerts")["alerts"]}

    def target_health(self) -> dict[str, str]:
        """Whether each instance could be scraped."""
        return {target["labels"]["instance"]: target["health"] for target in self._get("targets")["activeTargets"]}

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        end = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - http
                    answer: dict[str, Any] = json.load(response)["data"]
                    return answer
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error
            except (OSError, HTTPException):
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
