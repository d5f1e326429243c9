"""Grammars on their way to the scheduler, and the masks of rows: as long as they reason, then by their grammar."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLParserLimits, LLTokenizer

from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.grammar_check import TOO_COMPLEX, GrammarCheck, syntax_problem
from minisgl_batch.messages import (
    AbortRequests,
    AddRequests,
    Constraint,
    NewPrompt,
    NewRequest,
    RequestsRefused,
    SetVocabulary,
    Shutdown,
)
from minisgl_batch.scheduler import compiling, lane, lexers
from minisgl_batch.scheduler.compiling import CompilingSource
from minisgl_batch.scheduler.constraints import Constraints
from minisgl_batch.scheduler.lexers import MAX_LEXERS, ROWS_PER_LEXER
from minisgl_batch.scheduler.source import LocalSource
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_batch.tokenizer.detokenizer import make_detokenizer
from minisgl_batch.tokenizer.grammar import make_grammar
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.tokenizer.conftest import KINDS

EOS = 0
TOKENIZER = KINDS["byte_level"]()
VOCAB = TOKENIZER.get_vocab_size()


def grammar(**given: object) -> str:
    return make_grammar(StructuredOutputsParams(**given))  # type: ignore[arg-type]


def vocabulary(kind: str = "byte_level") -> SetVocabulary:
    tokenizer = KINDS[kind]()
    return SetVocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), (EOS,))


def prompt(constraint: Constraint | None, *uids: int) -> NewPrompt:
    return NewPrompt(b"\0" * 4, EngineSampling(max_tokens=9), [NewRequest(uid) for uid in uids], constraint)


class World:
    """Rank 0's source, which compiles, and what its frontend says and hears."""

    def __init__(self) -> None:
        self.frontend = LocalSource()
        self.constraints = Constraints()
        self.source = CompilingSource(self.frontend, self.constraints)

    def say(self, *messages: object) -> None:
        self.frontend.inbox.extend(messages)  # type: ignore[arg-type]

    def add(self, *prompts: NewPrompt) -> None:
        self.say(AddRequests(list(prompts)))

    def uids(self) -> list[int]:
        """Requests that came."""
        messages = [message for message in self.source.receive(block=False) if isinstance(message, AddRequests)]
        return [new.uid for message in messages for prompt in message.prompts for new in prompt.requests]

    def next_uids(self) -> list[int]:
        """The next requests, which must come."""
        return wait_for("requests", self.uids, 60)

    def next_refusal(self) -> RequestsRefused:
        """The next one, of which the source's caller hears at once."""

        def is_refused() -> bool:
            assert self.source.receive(block=True) == []
            return bool(self.frontend.outbox)

        wait_for("a refusal", is_refused, 60)
        message = self.frontend.outbox.popleft()
        assert isinstance(message, RequestsRefused)
        return message

    def start(self, constraint: Constraint, uid: int = 0) -> None:
        self.say(vocabulary())
        self.add(prompt(constraint, uid))
        assert self.next_uids() == [uid]

    def allowed(self, uid: int = 0) -> set[int]:
        masks = np.full((2, -(-VOCAB // 32)), 12345, dtype=np.int32)
        self.constraints.fill([-1, uid], masks)
        free, mask = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert np.flatnonzero(free).tolist() == list(range(VOCAB))
        return set(np.flatnonzero(mask).tolist())

    def ids(self, text: str) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def advance(self, *tokens: int, uid: int = 0) -> None:
        for token in tokens:
            assert token in self.allowed(uid)
            self.constraints.advance([uid], [token])


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.source.close()


class FakeChecks:
    """In place of GrammarCheck: checks take as much time as a test says, and end when it says so.

    Attributes:
        cpu_s: of a grammar; one without is done at once.
        begun, under_way: grammars.
    """

    def __init__(self) -> None:
        self.cpu_s: Callable[[str], float] = lambda _: 0.0
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.under_way: list[str] = []

    def problem(self, text: str, *, cpu_s: float, is_wanted: Callable[[], bool]) -> str:
        self.begun.append(text)
        if self.cpu_s(text) > cpu_s:
            return TOO_COMPLEX
        self.under_way.append(text)
        if self.cpu_s(text):
            while is_wanted() and not self.go_on.wait(0.005):
                pass
        self.under_way.remove(text)
        return ""

    def close(self) -> None:
        pass


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> FakeChecks:
    checks = FakeChecks()
    monkeypatch.setattr(lane, "GrammarCheck", lambda: checks)
    return checks


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_unstripped"])
def test_random_walks_are_texts_of_the_grammar(world: World, kind: str) -> None:
    """For tokenizers as models have them; what can't be spelt with whole tokens is spelt with bytes."""
    world.say(vocabulary(kind))
    tokenizer = KINDS[kind]()
    detokenizer, width = make_detokenizer(tokenizer), -(-tokenizer.get_vocab_size() // 32)
    patterns = ["[a-z]{3,9}", "x( ?[a-c]){3}", "(quick|brown) fox\n", "é[\u0100-\u0400]{2}x", "👍|다람쥐!?"] * 3
    uids = list(range(len(patterns)))
    world.add(*(prompt(Constraint(grammar(regex=pattern)), uid) for uid, pattern in zip(uids, patterns, strict=True)))
    came: list[int] = []
    wait_for("the grammars", lambda: came.extend(world.uids()) or sorted(came) == uids)
    texts: dict[int, list[int]] = {uid: [] for uid in uids}
    while uids:
        masks = np.zeros((len(uids), width), dtype=np.int32)
        world.constraints.fill(uids, masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        tokens = [random.choice(np.flatnonzero(row).tolist()) for row in bits]
        going = [(uid, token) for uid, token in zip(uids, tokens, strict=True) if token != EOS]
        uids = [uid for uid, _ in going]
        world.constraints.advance(uids, [token for _, token in going])
        for uid, token in going:
            texts[uid].append(token)
    assert not world.constraints.take_failures()
    for uid, pattern in enumerate(patterns):
        assert re.fullmatch(pattern, detokenizer.decode_full(texts[uid])), (pattern, texts[uid])


def test_a_complete_text_can_only_end_and_one_at_a_dead_end_must(world: World) -> None:
    world.start(Constraint(grammar(choice=["ab"])))
    world.advance(*world.ids("ab"))
    assert world.allowed() == {EOS}
    assert not world.constraints.take_failures()
    world.start(Constraint(grammar(grammar='start: "a" B\nB: /[^\\x00-\\U0010FFFF]/')), 1)
    world.advance(*world.ids("a"), uid=1)
    assert world.allowed(1) == {EOS}
    ((uid, why),) = world.constraints.take_failures()
    assert (uid, "no token can follow" in why) == (1, True)
    assert world.allowed(1) == {EOS}
    assert not world.constraints.take_failures()
    world.constraints.forget([0, 1, 2])
    assert len(world.allowed(1)) == VOCAB


def test_rows_go_on_with_lexers_that_come_later(world: World) -> None:
    pattern = "[a-z]{4}(-[0-9]{2}){6}"
    uids = list(range(5 * ROWS_PER_LEXER))
    world.say(vocabulary())
    world.add(*(prompt(Constraint(grammar(regex=pattern)), uid) for uid in uids))
    assert world.next_uids() == uids
    texts: dict[int, list[int]] = {uid: [] for uid in uids}
    while uids:
        masks = np.zeros((len(uids), -(-VOCAB // 32)), dtype=np.int32)
        world.constraints.fill(uids, masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        for uid, row in zip(uids, bits, strict=True):
            texts[uid].append(random.choice(np.flatnonzero(row).tolist()))
        uids = [uid for uid in uids if texts[uid][-1] != EOS]
        world.constraints.advance(uids, [texts[uid][-1] for uid in uids])
        world.source._adding.submit(int).result()  # they are there for the second token
    rows = world.constraints._rows
    assert max(row.lexer.num_rows for row in rows.values() if row.lexer) <= 2 * (len(rows) / min(5, MAX_LEXERS) + 1)
    for tokens in texts.values():
        assert re.fullmatch(pattern, TOKENIZER.decode(tokens[:-1])), tokens


def test_a_row_that_wears_out_its_lexer_fails_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share it go on where they are, and others begin. Of the expression's 2^9 states there may be 300."""
    few = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(compiling, "limits", lambda: few)
    world.say(vocabulary())
    world.add(prompt(Constraint(grammar(regex="[ab]*a[ab]{8}c")), 0, 1, 2))
    assert world.next_uids() == [0, 1, 2]
    assert world.allowed(0) == world.allowed(1) == world.allowed(2)
    tokens = [world.ids(char)[0] for char in "abc"]
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def advance(uid: int) -> set[int]:
        taken[uid].append(random.choice(tokens[:2]))
        world.constraints.advance([uid], taken[uid][-1:])
        return world.allowed(uid)

    for _ in range(20):
        assert advance(1) >= set(tokens[:2])
    for _ in range(2000):
        if advance(0) == {EOS}:
            break
    ((uid, why),) = world.constraints.take_failures()
    assert (uid, "lexer error" in why) == (0, True)
    for uid in (1, 2):
        assert (tokens[2] in advance(uid)) == (taken[uid][-9:][:1] == tokens[:1] and len(taken[uid]) > 8)
    assert world.allowed(0) == {EOS}
    world.add(prompt(Constraint(grammar(regex="[ab]*a[ab]{8}c")), 3))
    assert world.uids() == [3]
    world.advance(*tokens[:1] * 9, tokens[2], uid=3)
    assert not world.constraints.take_failures()


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_reasoning_is_free_and_the_answer_behind_it_is_not(world: World, in_reasoning: bool) -> None:
    opening, closing = 7, 9
    answer = world.ids("{")
    world.start(Constraint(grammar(json_object=True), (opening,), (closing,), (), in_reasoning))
    if not in_reasoning:
        assert world.allowed() > {opening, *answer}
        assert EOS not in world.allowed()
        world.advance(opening)
    assert world.allowed() == set(range(VOCAB)) - {EOS}  # an answer has to come
    world.advance(opening, 55, 200, closing)
    assert opening not in world.allowed()
    assert closing not in world.allowed()
    world.advance(*answer)


def test_requests_of_a_prompt_go_their_own_ways(world: World) -> None:
    world.say(vocabulary())
    world.add(prompt(Constraint(grammar(choice=["ab", "cd"])), 0, 1))
    assert world.next_uids() == [0, 1]
    world.advance(*world.ids("ab"))
    world.advance(*world.ids("c"), uid=1)
    world.advance(*world.ids("d"), uid=1)
    world.add(prompt(Constraint(grammar(choice=["ab", "cd"])), 2))
    assert world.uids() == [2]
    world.advance(*world.ids("a"), uid=2)
    assert world.allowed() == world.allowed(1) == {EOS} != world.allowed(2)


def test_a_text_may_do_without_reasoning(world: World) -> None:
    world.start(Constraint(grammar(choice=["no"]), (7,), (9,)))
    world.advance(*world.ids("no"))
    assert world.allowed() == {EOS}


def test_marks_of_several_tokens(world: World) -> None:
    """As gpt-oss has them: both what begins reasoning and what begins an answer without begin alike."""
    opening, closing, answering = (5, 6, 7), (8, 5, 9), (5, 9)
    constraint = Constraint(grammar(choice=["no"]), opening, closing, answering)
    first = {5} | {token for token in range(VOCAB) if TOKENIZER.id_to_token(token) in ("n", "no")}
    for uid, reasoning in enumerate([[], [33, 8, 5, 8, 5, 9]]):
        world.start(constraint, uid)
        assert world.allowed(uid) == first
        world.advance(5, uid=uid)
        assert world.allowed(uid) == {6, 9}
        if reasoning:
            world.advance(6, uid=uid)
            assert world.allowed(uid) == {7}
            world.advance(7, *reasoning, uid=uid)
        else:
            world.advance(9, uid=uid)
        assert world.allowed(uid) == first - {5}


SLOW = compiling.QUICK.cpu_s + 0.1


def test_no_row_waits_for_anothers_grammar(world: World, checks: FakeChecks) -> None:
    """Though as many take long as there are checks at a time, in both lanes."""
    slow, *others = [grammar(regex=f"slow{i}") for i in range(compiling.QUICK.num_checks + compiling.SLOW.num_checks)]
    checks.cpu_s = lambda text: SLOW if "slow" in text else 0.0
    world.say(vocabulary())
    world.add(prompt(Constraint(slow), 1, 2))
    world.add(*(prompt(Constraint(other), uid) for uid, other in enumerate(others, 10)))
    world.add(prompt(None, 3), prompt(Constraint(grammar(regex="fast")), 4), prompt(Constraint(slow), 5))
    came: list[int] = []
    wait_for("what needn't wait", lambda: came.extend(world.uids()) or came == [3, 4], 60)
    world.add(prompt(Constraint(grammar(regex="fast")), 6))
    assert world.uids() == [6]  # at once: its grammar is known
    abort = AbortRequests([2, 5, *range(10, 10 + len(others))])
    world.say(abort, Shutdown())
    assert world.source.receive(block=True) == [abort, Shutdown()]
    checks.go_on.set()
    assert world.next_uids() == [1]


def test_a_check_that_nobody_waits_for_ends(world: World, checks: FakeChecks) -> None:
    """Those that come after it have its place."""
    checks.cpu_s = lambda text: SLOW if "slow" in text else compiling.QUICK.cpu_s / 2 if "other" in text else 0.0
    world.say(vocabulary())
    texts = [f"slow{i}" for i in range(compiling.SLOW.num_checks)]
    world.add(*(prompt(Constraint(grammar(regex=text)), uid) for uid, text in enumerate(texts)))
    wait_for("all places to be taken", lambda: world.uids() or len(checks.under_way) == len(texts))
    world.say(AbortRequests(list(range(len(texts)))))
    wait_for("the end of the checks", lambda: world.uids() or not checks.under_way)


def test_few_lexers_are_there_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest comes when rows end, and what can't be used is refused before."""
    monkeypatch.setattr(world.source._quick, "limits", replace(compiling.QUICK, num_lexers=6, num_kept=2))
    texts = ["(a", *(f"{i}[a-z]" for i in range(20)), "(b"]
    world.say(vocabulary())
    world.add(*(prompt(Constraint(grammar(regex=text)), uid) for uid, text in enumerate(texts)))
    came: list[int] = []
    wait_for("the first", lambda: came.extend(world.uids()) or (len(came) == 6 and len(world.frontend.outbox) == 2))
    refused = [uid for message in world.frontend.outbox for uid, _ in message.refused]  # type: ignore[union-attr]
    assert sorted(refused) == [0, len(texts) - 1]
    for ended in range(len(texts) - 2 - 6):  # those that came last are kept, too
        assert world.uids() == []
        world.constraints.forget([came[ended]])
        came += world.next_uids()
        assert len(came) == ended + 7


def test_rows_of_a_grammar_leave_lexers_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexers, "MAX_LEXERS", 32)
    monkeypatch.setattr(world.source._quick, "limits", replace(compiling.QUICK, num_lexers=10))
    world.start(Constraint(grammar(regex="a+")))
    world.add(*(prompt(Constraint(grammar(regex="a+")), uid) for uid in range(1, 20 * ROWS_PER_LEXER)))
    world.next_uids()
    assert world.source._quick.num_free == 5


def test_an_idle_source_comes_back_while_it_compiles(world: World, checks: FakeChecks) -> None:
    """So that an interrupt can get in."""
    checks.cpu_s = lambda _: SLOW
    world.say(vocabulary())
    world.add(prompt(Constraint(grammar(regex="a")), 1))
    assert world.source.receive(block=True) == []
    assert not world.frontend.outbox
    checks.go_on.set()
    assert world.next_uids() == [1]


def test_slices_are_those_of_llguidance_and_more() -> None:
    slices = iter(compiling.SLICES)
    assert all(known in slices for known in LLTokenizer.general_slices())  # in their order


def test_what_nobody_waits_for_isnt_compiled(world: World, checks: FakeChecks) -> None:
    checks.cpu_s = lambda _: compiling.QUICK.cpu_s
    num_checks = compiling.QUICK.num_checks
    grammars = [grammar(regex=f"first{i}") for i in range(num_checks)]
    grammars += [grammar(regex=text) for text in ("aborted", "shared", "aborted")]
    world.say(vocabulary())
    world.add(*(prompt(Constraint(text), uid) for uid, text in enumerate(grammars)))
    world.add(prompt(Constraint(grammars[-2]), 100))
    wait_for("the first checks", lambda: world.uids() or len(checks.begun) == num_checks)
    abort = AbortRequests(list(range(len(grammars))))
    world.say(abort)
    assert world.source.receive(block=False) == [abort]
    checks.go_on.set()
    assert world.next_uids() == [100]
    assert sorted(checks.begun) == sorted([*grammars[:num_checks], grammars[-2]])
    world.add(prompt(Constraint(grammars[-1]), 101))
    assert world.next_uids() == [101]


def test_what_cant_be_used_is_refused_and_says_why(world: World) -> None:
    world.say(vocabulary())
    world.add(prompt(Constraint(grammar(regex="(a")), 1, 2))
    message = world.next_refusal()
    assert message.error_type == "invalid_request"
    assert [uid for uid, _ in message.refused] == [1, 2]
    assert "structured_outputs: " in message.refused[0][1]
    assert "unclosed group" in message.refused[0][1]
    world.add(prompt(Constraint(grammar(regex="(a")), 3))
    assert world.source.receive(block=False) == []  # at once: what is wrong with it is known
    assert world.frontend.outbox.popleft() == RequestsRefused([(3, message.refused[0][1])], "invalid_request")


def test_tokenizers_that_cant_be_used_are_named(world: World) -> None:
    world.say(vocabulary("word_piece"))
    world.add(prompt(Constraint(grammar(regex="a")), 1))
    assert "this model's tokenizer" in world.next_refusal().refused[0][1]


@pytest.mark.parametrize(
    ("limits", "given"),
    [
        ({"cpu_s": 0.2}, {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}}),
        ({"memory_bytes": 16 << 20}, {"json": {"type": "integer", "multipleOf": 99991}}),
    ],
)
def test_a_check_ends_whatever_it_checks(limits: dict[str, float], given: dict[str, object]) -> None:
    check = GrammarCheck(**limits)  # type: ignore[arg-type]
    assert syntax_problem(grammar(**given)) == ""
    assert check.problem(grammar(**given)) == TOO_COMPLEX
    assert check.problem(grammar(regex="a+")) == ""  # by another process
    assert "unclosed group" in check.problem(grammar(regex="(a"))
    check.close()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"json": {"items": {"uniqueItems": True}}}, '"uniqueItems" isn\'t supported in schemas: remove it'),
        (
            {"json": {"uniqueItems": True, "contains": {}}},
            '"contains" and "uniqueItems" aren\'t supported in schemas: remove them',
        ),
        (
            {"json": {"oneOf": [{"type": "string"}] * 2}},
            'a "oneOf" can hold at once, which isn\'t supported: use "anyOf"',
        ),
        ({"json": {"type": "string", "pattern": "[0-9"}}, 'regex "[0-9": unclosed character class'),
        ({"regex": " a|[0-9"}, 'regex " a|[0-9": unclosed character class'),
        ({"regex": "a\n("}, 'regex "a\\n(": unclosed group'),
        ({"regex": "(?P<a>x)(?P<a>y)"}, 'regex "(?P<a>x)(?P<a>y)": duplicate capture group name'),
        ({"regex": "a" * 400 + "("}, f'regex "{"a" * 99}…": unclosed group'),
        ({"grammar": 'start: a\na: "a" other'}, 'line 2, column 4: unknown name: "other"'),
    ],
)
def test_what_is_wrong_in_plain_words(given: dict[str, object], problem: str) -> None:
    found = syntax_problem(grammar(**given))
    assert found.endswith(problem), found
    assert "^" not in found


def test_what_a_check_can_read_can_be_compiled_with_twice_its_stack() -> None:
    def deep(size: int) -> str:
        rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(size))
        return grammar(grammar=f'start: r0\n{rules}\nr{size}: "a"')

    check, size = GrammarCheck(), 64
    while check.problem(deep(size * 2)) == "":
        size *= 2
    assert check.problem(deep(size * 2)) == check.syntax_problem(deep(size * 2)) == TOO_COMPLEX
    check.close()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(syntax_problem, deep(size)).result() == ""


def test_a_check_that_others_kill_is_made_again() -> None:
    check = GrammarCheck()
    assert check.problem(grammar(regex="a+")) == ""
    assert check._process is not None
    os.kill(check._process.pid, signal.SIGKILL)
    assert check.problem(grammar(regex="b+")) == ""
    check.close()
