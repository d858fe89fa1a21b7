"""Dead letters: messages that need a person. What can be done with one: redrive it, or discard it.

dead ──retry──► queued ──delivered──► resolved
  ▲               └──dies again──┐
  ├──────────────────────────────┘
  └──discard──► discarded
"""
