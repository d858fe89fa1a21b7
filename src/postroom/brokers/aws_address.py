"""Where SQS or SNS is, who we are there, and which queue or topic a topic of ours is.

    sqs://KEY:SECRET@eu-central-1/shop-{topic}.fifo?endpoint=http://localhost:5000

Promise: no text about the place holds a secret.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from postroom.brokers.options import known_only, whole_number
from postroom.errors import ConfigurationError, InvalidMessage

__all__ = ["AwsAddress"]

DEFAULT_CONCURRENCY = 16
DEFAULT_VISIBILITY_SECONDS = 30
_LONGEST_VISIBILITY_SECONDS = 43_200
_OPTIONS = {
    *("endpoint", "region", "account", "profile", "access_key", "secret_key", "session_token"),
    *("concurrency", "visibility_seconds"),
}
_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d{1,2}")
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.fifo)?")
_LONGEST_NAME = {"sqs": 80, "sns": 256}


@dataclass(frozen=True)
class AwsAddress:
    """The service, the names there, and the secrets apart."""

    service: str
    template: str
    region: str | None
    endpoint: str | None
    account: str | None
    profile: str | None
    concurrency: int
    visibility_seconds: int
    access_key: str | None = field(repr=False)
    secret_key: str | None = field(repr=False)
    session_token: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str, extra: Mapping[str, str]) -> AwsAddress:
        """The address of `sqs://` or `sns://`; `extra` gives options that the URL does not."""
        options, template = _read(url, extra)
        region = options.get("region")
        if region is not None and not _REGION.fullmatch(region):
            raise ConfigurationError(f"{region!r} is no region of AWS: write eu-central-1 or so")
        if ("access_key" in options) != ("secret_key" in options):
            raise ConfigurationError("access key and secret key of AWS come together or not at all")
        service = url.partition(":")[0]
        _check_template(service, template)
        return cls(
            service=service,
            template=template,
            region=region,
            endpoint=options.get("endpoint"),
            account=options.get("account"),
            profile=options.get("profile"),
            concurrency=whole_number(options, "concurrency", DEFAULT_CONCURRENCY, most=1000),
            visibility_seconds=whole_number(
                options,
                "visibility_seconds",
                DEFAULT_VISIBILITY_SECONDS,
                most=_LONGEST_VISIBILITY_SECONDS,
            ),
            access_key=options.get("access_key"),
            secret_key=options.get("secret_key"),
            session_token=options.get("session_token"),
        )

    def __str__(self) -> str:
        where = self.endpoint.partition("://")[2].rpartition("@")[2] if self.endpoint else ""
        return f"{self.service}://{self.region or ''}/{self.template}" + (
            f" at {where}" if where else ""
        )

    @property
    def fifo(self) -> bool:
        """Whether the names are of FIFO queues or topics."""
        return self.template.endswith(".fifo")

    def name_of(self, topic: str, consumer: str = "") -> str:
        """The queue or topic there of a topic here, or `InvalidMessage` if AWS has no such name."""
        return _name(self.service, self.template, topic, consumer)

    def settings(self) -> dict[str, Any]:
        """What aiobotocore's `create_client` needs to know; what is None, AWS's own ways decide."""
        return {
            "region_name": self.region,
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_session_token": self.session_token,
        }

    def without_secrets(self, text: str) -> str:
        for secret in (self.secret_key, self.session_token, self.access_key):
            text = text.replace(secret, "***") if secret else text
        return text


@functools.lru_cache(maxsize=4096)
def _name(service: str, template: str, topic: str, consumer: str) -> str:
    # AWS knows no dots in names, but for the end of a FIFO's.
    name = template.replace("{topic}", topic.replace(".", "-"))
    name = name.replace("{consumer}", consumer.replace(".", "-"))
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME[service]:
        raise InvalidMessage(
            f"{name!r} is no name for {service.upper()}: it takes letters, digits, '-' and '_', "
            f"at most {_LONGEST_NAME[service]} characters"
        )
    return name


def _read(url: str, extra: Mapping[str, str]) -> tuple[dict[str, str], str]:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)
                       if parts.query else ())  # fmt: skip
        host = parts.hostname or ""
        if parts.port is not None:
            raise ValueError
    except ValueError:
        # Not the URL itself: its secret key might stand in it.
        raise ConfigurationError(
            "bad URL of AWS: write sqs://REGION/NAME?option=value, and another server's address "
            "as the option endpoint"
        ) from None
    unknown = set(options) - _OPTIONS
    if unknown:
        known = ", ".join(sorted(_OPTIONS))
        raise ConfigurationError(f"no option {sorted(unknown)[0]!r} for AWS: there are {known}")
    if host:
        options.setdefault("region", host)
    if parts.username:
        options.setdefault("access_key", unquote(parts.username))
        options.setdefault("secret_key", unquote(parts.password or ""))
    options = known_only(parts.scheme, extra, _OPTIONS) | options
    return options, unquote(parts.path).strip("/") or "{topic}"


def _check_template(service: str, template: str) -> None:
    plain = template.replace("{topic}", "t").replace("{consumer}", "c")
    if not _NAME.fullmatch(plain):
        raise ConfigurationError(
            f"{template!r} names no queue: use letters, digits, '-' and '_', with {{topic}} where "
            "our topic stands, and .fifo at the end of a FIFO's"
        )
    if service == "sns" and "{consumer}" in template:
        raise ConfigurationError("{consumer} has no meaning for sns://, which only sends")
