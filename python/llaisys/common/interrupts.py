"""Ctrl-C while a program starts, when there is nothing to clean up. Imports only a built-in module:
it runs before all others."""

import _signal  # type: ignore[import-not-found]


def end_on_interrupt(enabled: bool) -> None:
    """End the process on Ctrl-C at once, without a traceback; or raise KeyboardInterrupt again.
    Does nothing outside of the main thread or where the program has another handler."""
    before, after = _signal.default_int_handler, _signal.SIG_DFL
    if not enabled:
        before, after = after, before
    if _signal.getsignal(_signal.SIGINT) == before:
        try:
            _signal.signal(_signal.SIGINT, after)
        except ValueError:  # not the main thread
            return
