"""Ctrl-C between steps, never in the middle of one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Holds SIGINT back inside the block, so that it can't tear bookkeeping apart.

    Call the value where an interrupt may come: it delivers a held one to the handler that was
    there before (by default: raises KeyboardInterrupt), and so does the end of the block. A second
    SIGINT while one is held is delivered at once: somebody insists. Does nothing outside the main
    thread, where Python has no signals, or where SIGINT has no Python handler.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            before(number, frame)
        held.append(frame)

    def deliver() -> None:
        if held:
            frame = held[0]
            held.clear()
            before(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
    deliver()
