"""Finds out what compiling a grammar comes to, in a process of its own: some would take hours, or all memory.

llguidance bounds most of what a grammar can ask for, but not all, and a thread can't be ended. The process knows no
model: it compiles for a vocabulary of single bytes. A fork of it does the work, so that one which dies of a grammar
costs no new start of Python. Called by rank 0 before it compiles, and where a grammar's syntax alone is looked at, on
which llguidance may run out of its stack, too.

A check is a line of JSON to the process, the grammar as a string, whether to compile it, and the processor time that it
may take, and one back: what is wrong with it, "" for nothing, or null where it took too much.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from minisgl_batch.words import one_line

CPU_S = 2.0
MEMORY_BYTES = 512 << 20
WALL_S = 60.0  # far more than any check takes on a busy machine
_LOOK_S = 0.05  # between looks whether anybody still waits
_MAX_CHARS = 300
_TRIES = 3  # when somebody kills the process, such as a system that is short of memory
_UNLIMITED_STACK_BYTES = 2 << 20  # a thread's, of glibc
_MIN_STACK_BYTES = 256 << 10
# What llguidance says: where in a Lark grammar, and below it the lines there or its own state.
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_DRAWING = re.compile(r"\n(?: *\d+ \| |<)")
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_BAD_REGEX = re.compile(r"regex parse error:\n    (.*)\n +\^[ ^]*\nerror: (.*)")
TOO_COMPLEX = "the grammar is too complex: make it smaller, or its counts and numbers"


class GrammarCheck:
    """One process that checks grammars, one after the other; started when the first comes. For one thread."""

    def __init__(self, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        """Processor time of a check, and memory beyond what the process needs anyway."""
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[str] | None = None
        self.syntax_problem = lru_cache(maxsize=64)(partial(self.problem, compiles=False))

    def problem(
        self,
        grammar: str,
        *,
        compiles: bool = True,
        cpu_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> str:
        """Why a grammar can't be used, "" if it can; after at most some seconds.

        Args:
            compiles: without, only what is wrong with it by itself is found; `syntax_problem` remembers that.
            cpu_s: processor time of this check; by default as it was made.
            is_wanted: asked now and then; once it says no, the check ends, and any answer will do.
        """
        line = json.dumps([grammar, compiles, self._cpu_s if cpu_s is None else cpu_s]) + "\n"
        try:
            return self._problem(line, is_wanted)
        except BaseException:  # such as an interrupt: the answer that is still to come is no other grammar's
            self.close()
            raise

    def _problem(self, line: str, is_wanted: Callable[[], bool]) -> str:
        for _ in range(_TRIES):
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it died: there will be no answer
                process.stdin.write(line)
                process.stdin.flush()
            until = time.monotonic() + WALL_S
            while not select.select([process.stdout], [], [], _LOOK_S)[0]:
                if not is_wanted() or time.monotonic() > until:
                    self.close()
                    return TOO_COMPLEX
            if answer := process.stdout.readline():
                problem: str | None = json.loads(answer)
                return TOO_COMPLEX if problem is None else problem
            self.close()
        return TOO_COMPLEX

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minisgl_batch.grammar_check", str(self._memory_bytes)]
        # In a session of its own: an interrupt from the terminal is none of its business.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # else a thread's memory is reserved in advance
        )
        return self._process

    def close(self) -> None:
        """End the process; the next check starts another."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and its fork, if a check is under way
            self._process.communicate()
            self._process = None


def limits() -> Any:
    """What a grammar may cost llguidance."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_items_in_row=5_000,
        max_lexer_states=40_000,
        verbose_errors=False,
    )


def syntax_problem(grammar: str) -> str:
    """What is wrong with a grammar by itself, "" if nothing is."""
    from llguidance import LLMatcher

    problem: str = LLMatcher.validate_grammar(grammar, None, limits=limits())
    return shown(problem)


def shown(problem: str) -> str:
    """What llguidance says, in plain words on one line, without the drawings around it."""
    said = " ".join(_DRAWING.split(problem)[0].split())
    if said == "NoExtensionBias":
        said = "no text can be one of the grammar"
    elif found := _UNKNOWN_KEYS.fullmatch(said):
        keys, is_one = found[1].replace(", ", " and "), ", " not in found[1]
        said = f"{keys} {'is' if is_one else 'are'}n't supported in schemas: remove {'it' if is_one else 'them'}"
    elif said.startswith("oneOf constraints"):
        said = 'the schemas of a "oneOf" can hold at once, which isn\'t supported: use "anyOf"'
    elif found := _BAD_REGEX.search(problem):
        said = f'regex "{one_line(found[1], _MAX_CHARS // 3)}": {found[2]}'
    elif found := _POSITION.match(said):
        said = f"line {found[1]}, column {found[2]}: {said[found.end() :]}"
    return one_line(said, _MAX_CHARS)


class _Bytes:
    """A vocabulary of single bytes, as llguidance asks for one."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"\xff<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main(memory_bytes: int) -> None:
    from llguidance import LLTokenizer, TokenizerWrapper

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_stack_bytes())
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()))
    while (process := os.fork()) and (code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])):
        if code == -signal.SIGKILL:  # no limit of its own ends it so
            sys.exit(1)
        _say(None)
    if not process:
        server = threading.Thread(target=_serve, args=(vocabulary, memory_bytes))
        server.start()
        server.join()


def _serve(vocabulary: Any, memory_bytes: int) -> None:
    from llguidance import LLMatcher

    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    for line in sys.stdin:
        grammar, compiles, cpu_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # ends the process
        problem = syntax_problem(grammar)
        if not problem and compiles:
            # What is wrong here but for time and memory may be right for the model's own vocabulary.
            LLMatcher(vocabulary, grammar, log_level=0, limits=limits()).compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(problem)


def _say(problem: str | None) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


def _stack_bytes() -> int:
    """Half of what the threads that compile have: what llguidance can read here, it can read there."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    usual = _UNLIMITED_STACK_BYTES if limit == resource.RLIM_INFINITY else limit
    return max(usual // 2, _MIN_STACK_BYTES) // resource.getpagesize() * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
