"""Shorter timeouts for tests."""

from dataclasses import fields, replace

from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts


def shorter(times: float, **seconds: float) -> Timeouts:
    """Return a peer's timeouts, so many times shorter; `seconds` are taken as they are."""
    shortened = {field.name: getattr(DEFAULT_TIMEOUTS, field.name) / times for field in fields(Timeouts)}
    return replace(DEFAULT_TIMEOUTS, **{**shortened, **seconds})
