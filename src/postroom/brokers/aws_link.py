"""The client of one AWS service: made when it is first needed, and made anew after a fork.

Promise: what AWS or the way to it answers becomes an outcome, in a sentence without secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any

from postroom.brokers.aws_address import AwsAddress
from postroom.brokers.aws_wire import refusal_of
from postroom.brokers.base import Outcome, Transient, Unknown
from postroom.brokers.invoke import describe
from postroom.errors import MissingDriver

__all__ = ["AwsLink", "Refusal"]

CONNECT_SECONDS = 3.0
LONGEST_POLL_SECONDS = 20.0  # of SQS; a shorter patience is every caller's own


class Refusal(Exception):
    """AWS said no to a request because of what stands in it; `code` is AWS's own."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class AwsLink:
    """Calls the methods of a client, and turns what goes wrong into outcomes."""

    def __init__(self, address: AwsAddress, service: str, *, timeout_seconds: float) -> None:
        try:
            from aiobotocore.config import AioConfig
            from aiobotocore.session import AioSession
            from botocore import exceptions
        except ImportError as error:
            scheme = address.service
            raise MissingDriver(
                f"{scheme}:// needs aiobotocore: pip install 'postroom[sqs]'"
            ) from error
        self._address, self._service = address, service
        self._errors: Any = exceptions
        self._new_session: Callable[..., Any] = AioSession
        # One attempt: the relay tries again itself, and knows what it has tried.
        self._config = AioConfig(
            connect_timeout=min(CONNECT_SECONDS, timeout_seconds),
            read_timeout=max(timeout_seconds, LONGEST_POLL_SECONDS),
            max_pool_connections=address.concurrency + 8,  # long polls hold theirs
            retries={"total_max_attempts": 1, "mode": "standard"},
            user_agent_extra="postroom",
        )
        # Its many files of descriptions are read in a thread, not on the loop.
        self._config.warm_up_loader_caches = True
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._making = asyncio.Lock()

    async def call(
        self, method: str, *, name: str, deadline: float, **arguments: Any
    ) -> dict[str, Any] | Outcome:
        """The answer to a request about the queue or topic `name`, or why there is none.

        Raises `Refusal` where the fault is in the arguments.
        """
        sent = False
        try:
            async with asyncio.timeout_at(deadline):
                client = await self._connected()
                sent = True
                work: Awaitable[dict[str, Any]] = getattr(client, method)(**arguments)
                return await work
        except self._errors.ClientError as error:
            told = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, said = str(told.get("Code") or "unknown"), self._safe(told.get("Message"))
            # The query protocol puts a prefix before what the JSON protocol calls by its name.
            known = refusal_of(code, said, status, name=name, service=self._service)
            if known is None:
                raise Refusal(
                    code, f"{self._service.upper()} refused it: {said} ({code})"
                ) from None
            return known
        except self._errors.ParamValidationError as error:
            raise Refusal("bad_request", self._safe(describe(error))) from None
        except Exception as error:
            return self._no_answer(error, sent=sent)

    def _no_answer(self, error: Exception, *, sent: bool) -> Outcome:
        errors = self._errors
        text = self._safe(describe(error))
        if isinstance(error, errors.NoCredentialsError | errors.CredentialRetrievalError):
            return Transient("no_credentials", f"no credentials for AWS: {text}", down="broker")
        unsent = (
            *(errors.EndpointConnectionError, errors.ConnectTimeoutError, errors.SSLError),
            *(errors.ProxyConnectionError, errors.NoRegionError, errors.ProfileNotFound),
        )
        if not sent or (isinstance(error, unsent) and not _broke(error)):
            said = f"cannot reach {self._address}: {text}"
            return Transient("unreachable", said, down="broker")
        return Unknown("timeout" if isinstance(error, TimeoutError) else "lost",
                       f"no answer from {self._address}: {text}", down="broker")  # fmt: skip

    def _safe(self, text: object) -> str:
        return self._address.without_secrets(str(text or "no reason given"))

    async def _connected(self) -> Any:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # After a fork, or on another loop, the old client is somebody else's: let go of it.
            self._home, self._client, self._making = home, None, asyncio.Lock()
            self._stack = contextlib.AsyncExitStack()
        async with self._making:
            if self._client is None:
                session = self._new_session(profile=self._address.profile)
                settings = {"config": self._config, **self._address.settings()}
                made = session.create_client(self._service, **settings)
                self._client = await self._stack.enter_async_context(made)
            return self._client

    async def region(self) -> str:
        """The region the client works in."""
        return str((await self._connected()).meta.region_name)

    async def close(self) -> None:
        """Close the client's connections."""
        if self._home == (os.getpid(), asyncio.get_running_loop()):
            self._client, stack = None, self._stack
            self._stack = contextlib.AsyncExitStack()
            await stack.aclose()


def _broke(error: Exception) -> bool:
    """Whether a connection that stood was lost: aiobotocore says the same of one that could not be
    made, and only what came before tells them apart."""
    from aiohttp import ClientConnectionError, ClientConnectorError

    before = error.__context__
    return isinstance(before, ClientConnectionError) and not isinstance(
        before, ClientConnectorError
    )
