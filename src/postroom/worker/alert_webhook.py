"""Alerts as a POST with a JSON document, to whatever takes such things.

The address is the secret of most webhooks, so only its host is ever shown.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from urllib.parse import unquote, urlsplit

from postroom.alerts import Alert, Receiver
from postroom.config import AlertSettings
from postroom.errors import ConfigurationError, Unreachable

__all__ = ["Webhook", "receivers"]

PAUSES_SECONDS = (0.5, 2.0)


def receivers(settings: AlertSettings) -> list[Receiver]:
    """Who is told of alerts by these settings, besides the log."""
    if settings.webhook_url is None:
        return []
    return [Webhook(settings.webhook_url, timeout_seconds=settings.webhook_timeout_seconds)]


class Webhook:
    """Posts alerts to a URL; called by the alerts' own thread, which may wait a little."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        pauses_seconds: tuple[float, ...] = PAUSES_SECONDS,
    ) -> None:
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError:
            self._host = None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigurationError("a webhook's URL is https://HOST/PATH.")
        self._secure = parts.scheme == "https"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"content-type": "application/json", "user-agent": "postroom"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            token = base64.b64encode(pair.encode()).decode()
            self._headers["authorization"] = f"Basic {token}"
        self._timeout = timeout_seconds
        self._pauses = pauses_seconds

    def __repr__(self) -> str:
        return f"webhook at {self._host}"

    def __call__(self, alert: Alert) -> None:
        """Post the alert; tries again a little, then says in one sentence what went wrong."""
        body = json.dumps(alert.document(), ensure_ascii=False).encode()
        for pause in (*self._pauses, None):
            wrong, again = self._post(body)
            if not wrong:
                return
            if pause is None or not again:
                raise Unreachable(f"{self!r} {wrong}")
            time.sleep(pause)

    def _post(self, body: bytes) -> tuple[str, bool]:
        """What went wrong, if anything, and whether another try may help."""
        assert self._host is not None
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("POST", self._path, body, self._headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return f"cannot be reached: {type(error).__name__}", True
        finally:
            connection.close()
        if 200 <= status < 300:
            return "", False
        return f"answered {status}", status >= 500 or status in (408, 425, 429)
