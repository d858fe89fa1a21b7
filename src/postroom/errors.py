"""Every error Postroom raises. The docstring of a class is its default message and says what to do.

PostroomError
├── ConfigurationError      a URL, setting or route that cannot work
│   ├── BadKey              what was given as an idempotency key is none; a ValueError too
│   ├── MissingDriver       the library for it is not installed
│   └── RoutingChanged      this relay's routes differ from those on record
├── SchemaError             Postroom's tables are absent or of another version
├── Unreachable             a database or broker does not answer
├── CommitUnknown           nobody can say any more whether the transaction committed
├── PublishError            the message was not written; the caller's transaction is untouched
│   ├── InvalidMessage      its content can never be sent
│   │   └── MessageTooLarge
│   ├── IdReused            another message has its id
│   ├── UnknownConnection   publish was given something it cannot write on
│   ├── WouldCommitAlone    the INSERT would commit by itself
│   ├── WrongCall           publish and publish_async were mixed up
│   ├── SeveralBinds        the session writes to several databases
│   └── NotWritten          a queued message can no longer be written; the commit is refused
├── ContentChanged          a message came again under its id with other content
├── KeyRefused              a call with an idempotency key was not carried out
│   ├── KeyReused           the key was used for another call
│   ├── KeyInProgress       somebody is at it
│   ├── KeyInDoubt          whether it was carried out is not known
│   ├── KeyLost             somebody else has taken it over
│   └── ResultNotKept       it was carried out before, and its result was too large to be kept
├── Rejected                for handlers: this message can never be handled
└── Refused                 an operator's action that does not fit the state of things

Expected outcomes (duplicate, lane lost) are values, not errors. Inside the caller's transaction
the driver's own exceptions pass through as they are.
"""

from __future__ import annotations

import inspect

__all__ = [
    "BadKey",
    "CommitUnknown",
    "ConfigurationError",
    "ContentChanged",
    "IdReused",
    "InvalidMessage",
    "KeyInDoubt",
    "KeyInProgress",
    "KeyLost",
    "KeyRefused",
    "KeyReused",
    "MessageTooLarge",
    "MissingDriver",
    "NotWritten",
    "PostroomError",
    "PublishError",
    "Refused",
    "Rejected",
    "ResultNotKept",
    "RoutingChanged",
    "SchemaError",
    "SeveralBinds",
    "UnknownConnection",
    "Unreachable",
    "WouldCommitAlone",
    "WrongCall",
]


def with_article(noun: str) -> str:
    """Return a name with "a" or "an" before it, for errors about classes of the caller."""
    vowel = noun[:1].lower() in ("a", "e", "i", "o") or noun in tuple("FHLMNRSX")
    return f"{'an' if vowel else 'a'} {noun}"


class PostroomError(Exception):
    """Something in Postroom went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or "").replace("\n", " "))


class ConfigurationError(PostroomError):
    """A setting cannot work; correct it and start again."""


class BadKey(ConfigurationError, ValueError):
    """The key is none: it must have 1 to 255 printable characters, quoted or bare."""


class MissingDriver(ConfigurationError):
    """The library for this connection is not installed."""


class RoutingChanged(ConfigurationError):
    """This relay's routes differ from those on record; start it with --rebind if that is meant."""


class SchemaError(PostroomError):
    """Postroom's tables are absent or of another version; run `postroom db upgrade`."""


class Unreachable(PostroomError):
    """The server does not answer; check its address and that it is running."""


class CommitUnknown(PostroomError):
    """Nobody can say whether this message was committed: the relay deletes delivered messages at
    once. Set keep_delivered to a time longer than your retries to make was_committed decide."""


class PublishError(PostroomError):
    """The message was not written."""


class InvalidMessage(PublishError):
    """The message can never be sent as it is."""


class MessageTooLarge(InvalidMessage):
    """The message is larger than the limit; store the large part elsewhere and send a reference,
    or raise Outbox(max_bytes=...) if the broker takes it."""


class IdReused(PublishError):
    """Another message has this id; give each message an id of its own, or none."""


class UnknownConnection(PublishError):
    """publish needs your session or connection: a SQLAlchemy Session, AsyncSession or Core
    connection, or a connection of a supported driver."""


class WouldCommitAlone(PublishError):
    """This connection commits every statement by itself, so the message would not share the fate
    of your change. Begin a transaction first."""


class WrongCall(PublishError):
    """This connection is asynchronous: write `await outbox.publish_async(...)`."""


class SeveralBinds(PublishError):
    """This session writes to several databases. Say which holds the outbox: Outbox(bind=engine)."""


class NotWritten(PublishError):
    """A queued message can no longer be written with its transaction, so the commit is refused.
    Use `await outbox.publish_async(...)` here: it writes at once."""


class ContentChanged(PostroomError):
    """A message came again under the same id with other content."""


class KeyRefused(PostroomError):
    """The call was not carried out, because of its idempotency key."""


class KeyReused(KeyRefused):
    """The key was used for another call; use a new key for a new call."""


class KeyInProgress(KeyRefused):
    """A call with this key is being carried out; try again in a while."""


class KeyInDoubt(KeyRefused):
    """Whether the call was carried out is not known; `postroom keys resolve` decides it."""


class KeyLost(KeyRefused):
    """The lease of this run is over and somebody else goes on with it; nothing was written."""


class ResultNotKept(KeyRefused):
    """The call was carried out before, and its result was too large to be kept."""


class Rejected(PostroomError):
    """The message can never be handled; it becomes a dead letter without another try.

    A handler raises it. `code` is what the letter is listed under.
    """

    def __init__(self, message: str | None = None, *, code: str = "rejected") -> None:
        super().__init__(message or "the handler rejected the message")
        self.code = code


class Refused(PostroomError):
    """The action does not fit the present state; nothing was changed."""
