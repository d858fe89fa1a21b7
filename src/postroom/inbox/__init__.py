"""The in-tray: what a consumer has handled, so that a message that comes again is applied once.

from postroom import inbox

with Session(engine) as session, session.begin():
    if inbox.once(session, "billing", message_id):
        ...                                   # the effect, on the same session
"""

from postroom.inbox.once import once, once_async

__all__ = ["once", "once_async"]
