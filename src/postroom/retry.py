"""When to try again, and when to give up. Pure: attempt and error in, seconds or None out."""

from __future__ import annotations

import random as _random
from collections.abc import Callable
from dataclasses import dataclass

from postroom.errors import ConfigurationError

__all__ = ["DEFAULT_DELAYS_SECONDS", "RetryPolicy"]

DEFAULT_DELAYS_SECONDS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
SMALLEST_DELAY_SECONDS = 0.001
LONGEST_DELAY_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A list of delays, or `RetryPolicy.exponential(...)`: growing with a cap and full jitter.

    `attempts` counts every try, the first one too: six attempts use the first five delays. A list
    shorter than that repeats its last delay.
    """

    delays_seconds: tuple[float, ...] = DEFAULT_DELAYS_SECONDS
    attempts: int = 6
    full_jitter: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"attempts must be 1 or more, not {self.attempts}")
        if not self.delays_seconds and self.attempts > 1:
            raise ConfigurationError("a retry policy with several attempts needs delays")
        for delay in self.delays_seconds:
            if not 0 < delay <= LONGEST_DELAY_SECONDS:
                raise ConfigurationError(
                    f"a delay must be above 0, at most {LONGEST_DELAY_SECONDS:.0f} s, not {delay}"
                )

    @classmethod
    def exponential(
        cls,
        *,
        initial_seconds: float = 1.0,
        multiplier: float = 2.0,
        cap_seconds: float = 300.0,
        attempts: int = 6,
    ) -> RetryPolicy:
        """Delays that grow by `multiplier` up to `cap_seconds`, each drawn between 0 and that."""
        if not (initial_seconds > 0 and multiplier >= 1 and cap_seconds >= initial_seconds):
            raise ConfigurationError(
                "exponential back-off needs initial_seconds > 0, multiplier >= 1 "
                "and cap_seconds >= initial_seconds"
            )
        delays: list[float] = []
        delay = initial_seconds
        while len(delays) < attempts - 1:
            delays.append(delay)
            if delay >= cap_seconds:
                break
            delay = min(delay * multiplier, cap_seconds)
        return cls(tuple(delays) or (initial_seconds,), attempts, full_jitter=True)

    def delay_after(
        self,
        attempt: int,
        *,
        retry_after_seconds: float | None = None,
        random: Callable[[], float] = _random.random,
    ) -> float | None:
        """Seconds to wait after the `attempt`-th try (from 1) failed; None: give up.

        A receiver's own wish (`retry_after_seconds`) is honoured, within bounds.
        """
        if attempt >= self.attempts:
            return None
        delay = self.delays_seconds[min(attempt, len(self.delays_seconds)) - 1]
        if self.full_jitter:
            delay *= random()
        if retry_after_seconds is not None and retry_after_seconds == retry_after_seconds:
            delay = max(delay, retry_after_seconds)
        return min(max(delay, SMALLEST_DELAY_SECONDS), LONGEST_DELAY_SECONDS)
