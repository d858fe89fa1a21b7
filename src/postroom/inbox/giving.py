"""The connection or session that a consumer gives its handlers, and refused combinations.

Promise: no handler is started whose changes would commit outside of its message's transaction,
where that can be known beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from postroom import framework
from postroom.databases.django import is_set_up
from postroom.errors import ConfigurationError

if TYPE_CHECKING:
    from postroom.inbox.consumer import Consumer

__all__ = ["Gives", "check_handlers", "gives_for"]

Gives: TypeAlias = Literal["session", "connection", "driver", "django"]


def gives_for(gives: Gives | None, database: str | None, using: str | None) -> Gives:
    """Return what handlers work on; raise `ConfigurationError` if the arguments contradict."""
    if gives is None:
        in_django = framework.present() is not None and database is None
        gives = "django" if in_django else "session"
    if gives not in get_args(Gives):
        raise ConfigurationError(f"gives must be one of {', '.join(get_args(Gives))}.")
    if gives == "django" and framework.present() is None:
        raise ConfigurationError(
            'gives="django" needs the app "postroom.django" in INSTALLED_APPS, and Django set up.'
        )
    if gives == "django" and database is not None:
        raise ConfigurationError(
            "a consumer that works on Django's connection takes no database URL: name an alias of "
            "DATABASES with using=…."
        )
    if gives != "django" and using is not None:
        raise ConfigurationError('using names an alias of DATABASES and needs gives="django".')
    return gives


def check_handlers(consumer: Consumer) -> None:
    """Raise `ConfigurationError` if handlers could not work, or not in their transaction."""
    _ = consumer.broker
    if consumer.gives == "django":
        consumer.handlers.require_sync(
            "Django's transactions are synchronous: write it with `def`, and it runs in a thread "
            "inside transaction.atomic()."
        )
    elif not consumer.chose_gives and is_set_up():
        name = consumer.name
        raise ConfigurationError(
            f"Django is set up in this process and consumer {name} gives its handlers a session of "
            "SQLAlchemy: changes made with Django's ORM would not commit together with the "
            f"message. Write Consumer({name!r}) without a database URL to work inside "
            'transaction.atomic(), or gives="session" if no handler uses the ORM.'
        )
