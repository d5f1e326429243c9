"""How the rows of a grammar are spread over lexers."""

from __future__ import annotations

import random

from minisgl_batch.scheduler.lexers import MAX_LEXERS, ROWS_PER_LEXER, Grammar, Lexer


class FakeMatcher:
    """A matcher knows whose copy it is."""

    def __init__(self, original: FakeMatcher | None = None) -> None:
        self.original = original or self

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self.original)


def add_lexers(grammar: Grammar) -> int:
    num_new = grammar.order(99)
    assert grammar.order(99) == 0
    for _ in range(num_new):
        grammar.add_lexer()
    return num_new


def test_rows_have_as_few_others_beside_them_as_can_be() -> None:
    grammar = Grammar(FakeMatcher)
    for _ in range(num_rows := random.randint(1, 2 * ROWS_PER_LEXER * MAX_LEXERS)):
        grammar.expect()
    num_lexers = 1 + add_lexers(grammar)
    assert num_lexers == min(-(-num_rows // ROWS_PER_LEXER), MAX_LEXERS)
    rows = [grammar.begin() for _ in range(num_rows)]
    assert all(matcher.original is lexer.matcher is not matcher for matcher, lexer in rows)
    assert {lexer.num_rows for _, lexer in rows} <= {num_rows // num_lexers, -(-num_rows // num_lexers)}


def test_rows_that_began_before_their_lexers_came_spread_over_them() -> None:
    grammar = Grammar(FakeMatcher)
    for _ in range(num_rows := random.randint(2, 2 * ROWS_PER_LEXER * MAX_LEXERS)):
        grammar.expect()
    lexers = [grammar.begin()[1] for _ in range(num_rows)]
    assert not grammar.is_crowded(lexers[0])
    num_lexers = 1 + add_lexers(grammar)
    for _ in range(2):
        for i, lexer in enumerate(lexers):
            if grammar.is_crowded(lexer):
                grammar.leave(lexer)
                lexers[i] = grammar.begin()[1]
    assert max(lexer.num_rows for lexer in lexers) <= 2 * (num_rows / num_lexers + 1)


def test_lexers_go_with_the_rows() -> None:
    grammar = Grammar(FakeMatcher)
    rows: list[Lexer | None] = []
    for _ in range(random.randint(0, 300)):
        if random.random() < 0.7:
            grammar.expect()
            add_lexers(grammar)
            rows.append(grammar.begin()[1] if random.random() < 0.9 else None)  # some go before they begin
        elif rows:
            grammar.end(rows.pop(random.randrange(len(rows))))
    random.shuffle(rows)
    for lexer in rows:
        grammar.end(lexer)
    assert len({id(grammar.begin()[1]) for _ in range(9)}) <= 2


def test_a_worn_out_lexer_gets_no_rows() -> None:
    grammar = Grammar(FakeMatcher)
    for _ in range(2):
        grammar.expect()
    (_, worn_out), (_, also) = grammar.begin(), grammar.begin()
    assert worn_out is also
    own = [grammar.leave_worn_out(worn_out)[1] for _ in range(2)]
    assert worn_out.num_rows == 0
    assert grammar.begin()[1] not in [worn_out, *own]
    for lexer in own:
        grammar.end(lexer)
