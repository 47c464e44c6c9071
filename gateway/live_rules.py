"""The rules in force, and their exchange while requests run: by a look at the files every few seconds, or
when asked.

    version = live.current          one reference: a request takes it once, for input and output
    async with live.watching():     looks at the files; SIGHUP makes it look at once

What is wrong with a file never touches the rules in force: it is logged, counted and told by `status`. With
several processes each one looks by itself.

Not here: reading a rules file (`rule_files.py`), and what a version is made of (`rules_version.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filters.rules import RuleError, RuleSet
from gateway.metrics import Metrics
from gateway.rule_files import parse_all_rules, read_regular
from gateway.rules_version import (
    RuleOptions,
    RulesVersion,
    compile_rules,
    discard_when_unused,
    unnoticed,
)

log = logging.getLogger("headrace.rules")

RETRY_S: Final = 1.0  # without polling: to the next look at files that were being written

Signature = tuple[tuple[int, int, int] | None, ...]  # of each file; None: it cannot be read


class LiveRules:
    """The rules of some files, always one whole version of them. Belongs to one event loop.

    `action`: what a plain word list does. `reload_s`: time between two looks; 0 is never. Compiles at once:
    raises `RuleError`, `OSError`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        action: str,
        options: RuleOptions,
        metrics: Metrics,
        reload_s: float = 2.0,
    ) -> None:
        self._paths = tuple(paths)
        self._action = action
        self._options = options
        self._metrics = metrics
        self._reload_s = reload_s
        self._wanted = asyncio.Event()
        self._looking = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rules")
        self._last_look = self._decided = self._signature()
        self.last_error: Exception | None = None
        self.current = compile_rules(self._read(), options, 1)
        self._metrics.rules_version.set(1)

    def request_reload(self) -> None:
        """Look at the files now, even if they seem not to have changed. For a signal."""
        self._wanted.set()

    def status(self) -> dict[str, Any]:
        """For an operator. Of an error only the place: the message in the log may quote a keyword."""
        version = self.current
        return {
            "version": version.number,
            "fingerprint": version.fingerprint,
            "num_rules": version.num_rules,
            "num_keywords": version.num_keywords,
            "loaded_at": datetime.fromtimestamp(version.loaded_at_s, UTC).isoformat(timespec="seconds"),
            "last_error": _place(self.last_error),
        }

    def publish(self) -> None:
        """Bring the gauges and counters of the scanned texts up to date."""
        seen = self.current.seen
        if seen is not None:
            self._metrics.seen_text_bytes.set(seen.num_bytes)
            self._metrics.scanned_texts.labels("known").inc(seen.hits)
            self._metrics.scanned_texts.labels("new").inc(seen.misses)
            seen.hits = seen.misses = 0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Exchange the rules whenever their files change, and at SIGHUP."""
        task = asyncio.create_task(self._watch(), name="watch rule files")
        has_signal = self._listen()
        try:
            yield
        finally:
            if has_signal:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            task.cancel()
            await asyncio.wait([task])
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _listen(self) -> bool:
        """A gateway in a terminal ends with it, as ever: there SIGHUP means that it was closed."""
        if threading.current_thread() is not threading.main_thread() or sys.stderr.isatty():
            return False
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.request_reload)
        return True

    async def _watch(self) -> None:
        is_certain = True
        while self._paths:
            pause_s = self._reload_s or (None if is_certain else RETRY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause_s)
            is_forced = self._wanted.is_set()
            self._wanted.clear()
            is_certain = await self.look(is_forced or not is_certain)

    async def look(self, is_forced: bool = False) -> bool:
        """Look at the files; False if they were being written, so that nothing can be said yet.

        A file that has changed since the last look is read at the next one: it may be half written.
        `is_forced`: read it now.
        """
        async with self._looking:
            return await self._look(is_forced)

    async def _look(self, is_forced: bool) -> bool:
        loop = asyncio.get_running_loop()
        try:
            version = await loop.run_in_executor(self._thread, self._newer, is_forced)
        except _BeingWritten:
            return not is_forced
        except Exception as error:
            if not isinstance(error, RuleError | OSError):
                log.exception("the rules cannot be compiled")  # a fault of ours; the old ones stay on too
            self._refuse(error)
            return True
        if version is None:
            return True
        if version is not self.current:
            self._exchange(version)
        elif self.last_error is not None:
            log.info("the rule files are as they were: version %d stays on", version.number)
        self.last_error = None
        return True

    def _exchange(self, version: RulesVersion) -> None:
        discard_when_unused(self.current, self._thread)
        self.publish()
        self.current = version
        self._metrics.rules_version.set(version.number)
        self._metrics.rules_reloads.inc()
        log.info(
            "rules version %d: %d rules, %d keywords, fingerprint %s, compiled in %.2f s",
            version.number,
            version.num_rules,
            version.num_keywords,
            version.fingerprint[:12],
            version.compile_s,
        )

    def _refuse(self, error: Exception) -> None:
        self.last_error = error
        self._metrics.rules_failed_reloads.inc()
        log.warning("the rules are not exchanged, version %d stays on: %s", self.current.number, error)

    def _newer(self, is_forced: bool) -> RulesVersion | None:
        """The version that the files now make, or the current one; None if there is no news. In the thread.

        Raises what is wrong with them, once for each content.
        """
        before = self._signature()
        if not is_forced:
            if before == self._decided:
                return None
            if before != self._last_look:
                self._last_look = before
                raise _BeingWritten
        with unnoticed():
            try:
                rules = self._read()
            finally:
                if self._signature() != before:
                    raise _BeingWritten
                self._decided = self._last_look = before
            if rules.fingerprint == self.current.fingerprint:
                return self.current
            return compile_rules(rules, self._options, self.current.number + 1)

    def _read(self) -> RuleSet:
        return parse_all_rules([(path, read_regular(path)) for path in self._paths], self._action)

    def _signature(self) -> Signature:
        return tuple(map(_stat, self._paths))


class _BeingWritten(Exception):
    """The files changed a moment ago."""


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(Path(path).expanduser())
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _place(error: Exception | None) -> str | None:
    """Which file and line; the folder is nobody's business."""
    if error is None:
        return None
    if isinstance(error, RuleError):
        return f"{Path(error.source).name}:{error.line}: see the log"
    name = Path(str(error.filename)).name if isinstance(error, OSError) and error.filename else "rules"
    return f"{name}: {type(error).__name__}"
