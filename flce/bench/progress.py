"""A progress bar: tqdm's where it is installed, else a line that is written again."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

WIDTH = 30


class Progress:
    """Seconds of `limit` that have passed; a context manager. Nothing is shown where `out` is no
    terminal, but a line for each new text."""

    def __init__(self, limit: float, out: TextIO | None = None) -> None:
        self._limit, self._out = limit, out or sys.stderr
        self._begin, self._text, self._bar = time.monotonic(), "", self._make_bar()

    def _make_bar(self) -> Any:
        if not self._out.isatty():
            return None
        try:
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return None
        form = "{desc:24}|{bar:30}| {n:.0f} of {total:.0f} s"
        return tqdm(total=self._limit, file=self._out, bar_format=form, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._out.isatty():
            print("\r" + " " * (WIDTH + 40) + "\r", end="", file=self._out, flush=True)

    def show(self, text: str) -> None:
        """Says what is being done, and how much time has passed."""
        passed = min(time.monotonic() - self._begin, self._limit)
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.n = passed
            self._bar.refresh()
        elif self._out.isatty():
            done = int(WIDTH * passed / self._limit) if self._limit else WIDTH
            bar = "#" * done + "." * (WIDTH - done)
            line = f"\r{text:24}|{bar}| {passed:.0f} of {self._limit:.0f} s"
            print(line, end="", file=self._out, flush=True)
        elif text != self._text:
            print(text, file=self._out, flush=True)
        self._text = text
