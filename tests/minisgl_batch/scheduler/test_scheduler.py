"""The scheduler over an engine of plain numbers (fake_engine.py): outputs, pages and ends of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_batch.batch import SharingCosts
from minisgl_batch.scheduler.decode import LengthEstimate
from tests.minisgl_batch.scheduler.fake_engine import Harness

ALWAYS_SHARE = SharingCosts(per_saved_token=1.0, base=0.0, per_row=0.0, per_prefix_token=0.0, min_rows=2, max_groups=2)
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """A small engine and a story of adds, aborts and ticks."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_seq_len = draw(st.integers(4, 48))
    least_pages = -(-max_seq_len // page_size)
    config = {
        "page_size": page_size,
        "max_seq_len": max_seq_len,
        "num_pages": draw(st.integers(least_pages, least_pages * 5)),
        "max_running": draw(st.integers(1, 6)),
        "max_prefill_tokens": draw(st.integers(1, 40)),
        "overlap": draw(st.booleans()),
        "mixed": draw(st.booleans()),
        "sharing": draw(st.sampled_from([None, ALWAYS_SHARE])),
        "cache": draw(st.sampled_from(["radix", "radix", "radix", "naive"])),
    }
    # Prompts begin with one of a few stems, so that they share prefixes of all lengths.
    stems = draw(st.lists(st.lists(st.integers(10, 12), min_size=1, max_size=40), min_size=1, max_size=3))
    add = st.tuples(
        st.just("add"),
        st.tuples(
            st.sampled_from(stems),
            st.integers(0, 40),
            st.lists(st.integers(10, 12), max_size=6),
            st.integers(1, 24),
            st.booleans(),
        ),
    )
    event = st.one_of(
        add, add, st.tuples(st.just("tick"), st.integers(1, 5)), st.tuples(st.just("abort"), st.integers(0, 20))
    )
    return config, draw(st.lists(event, min_size=1, max_size=25))


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_any_story_gives_right_outputs_and_loses_no_page(story: tuple[dict[str, Any], list[tuple[str, Any]]]) -> None:
    config, events = story
    harness = Harness(**config)
    for kind, value in events:
        if kind == "add":
            stem, cut, tail, max_tokens, ignore_eos = value
            prompt = (stem[:cut] + tail or [10])[: config["max_seq_len"] + 2]
            harness.add(prompt, max_tokens, ignore_eos)
        elif kind == "abort":
            harness.abort(value)
        elif harness.pending or harness.source.inbox:
            for _ in range(value):
                if harness.pending or harness.source.inbox:
                    harness.tick()
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.cache.num_available_pages == config["num_pages"]
    for uid in harness.refused:
        assert len(harness._requests[uid][0]) >= config["max_seq_len"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.sampled_from([12, 13, 30]))
def test_rows_that_overflow_fail_and_leave_nothing_behind(
    story: tuple[dict[str, Any], list[tuple[str, Any]]], spoiler: int
) -> None:
    """Rows that went on from what they had computed by then don't fail with them."""
    config, events = story
    harness = Harness(spoiler=spoiler, **config)
    for kind, value in events:
        if kind == "add":
            stem, cut, tail, max_tokens, ignore_eos = value
            harness.add((stem[:cut] + tail or [10])[: config["max_seq_len"] - 1], max_tokens, ignore_eos)
        elif kind == "abort":
            harness.abort(value)
        else:
            for _ in range(value):
                if harness.pending or harness.source.inbox:
                    harness.tick()
    harness.run()
    assert harness.scheduler.cache.num_available_pages == config["num_pages"]
    for uid in harness.refused:
        assert (harness.outputs[uid], "overflow") == harness.expected(uid)
    harness.check_outputs()
    assert all(harness.expected(uid)[1] != "overflow" for uid, how in harness.finished.items() if how != "abort")


@LOOPS
@pytest.mark.parametrize("abort", [False, True])
def test_rows_beside_one_that_overflows_run_again_without_its_pages(overlap: bool, abort: bool) -> None:
    """They took its first tokens before one told that these had overflowed; an abort meanwhile holds."""
    stem, spoiler = list(range(10, 18)), 30
    harness = Harness(overlap=overlap, spoiler=spoiler, max_prefill_tokens=64, max_running=8)
    bad, *good = (harness.add([*stem, token], max_tokens=2) for token in (spoiler, 40, 41, 42))
    for _ in range(3):
        harness.tick()
    if abort:
        harness.abort(*good)
    harness.run()
    assert list(harness.refused) == [bad]
    assert set(harness.finished) == set(good)
    harness.check_outputs()


@LOOPS
def test_a_row_aborted_in_a_prompt_that_overflows_leaves_nothing_behind(overlap: bool) -> None:
    """No token of it has told yet that its first piece did."""
    stem, spoiler = list(range(10, 18)), 30
    harness = Harness(overlap=overlap, spoiler=spoiler, max_prefill_tokens=12)
    aborted = harness.add([*stem, spoiler, *stem])
    harness.tick()
    harness.abort(aborted)
    harness.tick()
    for _ in range(2):
        good = harness.add([*stem, 40], max_tokens=2)
        harness.run()
        assert good in harness.finished
    harness.check_outputs()
    assert harness.cached == {1: 0, 2: 8}


@LOOPS
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompt_of_whole_pages_is_served_again_from_the_cache(overlap: bool, page_size: int, offset: int) -> None:
    prompt = list(range(10, 10 + 32 + offset))
    harness = Harness(page_size=page_size, overlap=overlap, max_prefill_tokens=64)
    for _ in range(2):
        harness.add(prompt, max_tokens=3)
        harness.run()
    harness.check_outputs()
    # One token at least is computed, so that there are logits to sample from.
    assert harness.cached == {0: 0, 1: (len(prompt) - 1) // page_size * page_size}


@LOOPS
def test_hundred_identical_prompts_compute_their_prefix_once(overlap: bool) -> None:
    harness = Harness(overlap=overlap, max_running=100, num_pages=2000, max_prefill_tokens=1000)
    for _ in range(100):
        harness.add(list(range(10, 43)), max_tokens=3)
    harness.run()
    harness.check_outputs()
    computed = sum(int(step.q_lens[step.num_decode :].sum()) for step in harness.engine.steps)
    assert computed == 33 + 99
    assert list(harness.cached.values()) == [0] + [32] * 99


@LOOPS
def test_pages_of_two_identical_prompts_survive_fillers(overlap: bool) -> None:
    """Both compute the same pages when a naive look-up misses; freeing the wrong copy would corrupt the other."""
    harness = Harness(overlap=overlap, num_pages=24, max_running=3, max_prefill_tokens=7)
    for _ in range(2):
        harness.add(list(range(10, 35)), max_tokens=10, ignore_eos=True)
    harness.tick()
    for start in range(40, 46):
        harness.add(list(range(start, start + 20)), max_tokens=6, ignore_eos=True)
    harness.run()
    harness.check_outputs()


@LOOPS
def test_abort_at_every_step_frees_all_pages(overlap: bool) -> None:
    for step in range(30):
        harness = Harness(overlap=overlap, max_prefill_tokens=5)
        kept = harness.add(list(range(10, 25)), max_tokens=12, ignore_eos=True)
        dropped = harness.add([*range(10, 20), 3, 4, 5, 6, 8, 9], max_tokens=10, ignore_eos=True)
        for _ in range(step):
            if harness.pending:
                harness.tick()
        harness.abort(dropped)
        if harness.pending:
            harness.run()
        harness.check_outputs()
        assert harness.finished[kept] == "length"
        assert harness.scheduler.cache.num_available_pages == harness.config.num_pages


@LOOPS
def test_aborted_row_is_out_of_the_step_after_next(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.add([10, 11], max_tokens=50, ignore_eos=True)
    dropped = harness.add([12, 13], max_tokens=50, ignore_eos=True)
    for _ in range(5):
        harness.tick()
    harness.abort(dropped)
    harness.tick()
    assert harness.finished == {dropped: "abort"}
    harness.tick()
    assert harness.engine.steps[-1].num_rows == 1
    assert harness.scheduler.table.num_used_slots == 1


@LOOPS
def test_rows_that_outgrow_the_pool_are_retracted_and_lose_no_token(overlap: bool) -> None:
    harness = Harness(overlap=overlap, num_pages=16, max_running=4, max_seq_len=64)
    for start in range(10, 18):
        harness.add([start, start + 1, start + 2], max_tokens=50, ignore_eos=True)
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert stats.num_retractions > 0
    assert stats.output_tokens == 8 * 50


def test_rows_are_admitted_on_their_likely_length() -> None:
    """Rows whose max_tokens alone would fill the pool run together, since the rows before them were short."""
    harness = Harness(num_pages=64, max_seq_len=256, max_running=8, max_prefill_tokens=64)
    rng = random.Random(0)
    for _ in range(64):
        harness.add([rng.randrange(8, 40) for _ in range(4)], max_tokens=200)
    harness.run()
    harness.check_outputs()
    # 64 pages of 4 tokens: reserving max_tokens would run one row at a time.
    assert max(step.num_decode for step in harness.engine.steps) >= 4


def test_expected_growth_of_waiting_rows_is_what_they_add_once_they_run() -> None:
    harness = Harness(max_running=8, max_prefill_tokens=500, num_pages=500)
    for _ in range(8):
        harness.add([random.randrange(10, 50) for _ in range(random.randint(1, 30))], random.randint(2, 30), True)
    scheduler = harness.scheduler
    for message in harness.source.receive(block=False):
        scheduler._handle(message)
    expected = sum(scheduler.decode.expected_growth_of(req) for req in scheduler._reqs.values())
    assert scheduler.decode.expected_growth() == 0
    harness.tick()
    assert scheduler.table.num_used_slots == 8
    assert scheduler.decode.expected_growth() == expected


def test_rows_of_one_token_say_nothing_about_others() -> None:
    harness = Harness(max_running=4, num_pages=100)
    for _ in range(200):
        harness.add([10, 11], max_tokens=1, ignore_eos=True)
    harness.run()
    assert harness.scheduler.decode.estimate.ratio == LengthEstimate.INITIAL


def test_a_budget_of_one_token_still_prefills() -> None:
    harness = Harness(max_prefill_tokens=1)
    harness.add(list(range(10, 30)), max_tokens=2)
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("length", [0, 64, 65])
def test_prompt_that_can_never_run_is_refused_and_others_go_on(length: int) -> None:
    harness = Harness(max_seq_len=64)
    refused = harness.add([10] * length)
    served = harness.add([11, 12], max_tokens=2)
    harness.run()
    assert set(harness.refused) == {refused}
    assert str(length) in harness.refused[refused]
    assert set(harness.finished) == {served}


def test_output_ends_at_the_longest_sequence() -> None:
    harness = Harness(max_seq_len=16)
    uid = harness.add([10] * 10, max_tokens=100, ignore_eos=True)
    harness.run()
    assert len(harness.outputs[uid]) == 6
    assert harness.finished[uid] == "length"


def test_shutdown_ends_the_loop() -> None:
    harness = Harness()
    harness.add([10, 11])
    harness.tick()
    harness.stop()


def test_wrong_books_cost_the_cache_not_the_group(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.add(list(range(10, 30)), max_tokens=2)
    harness.run()
    harness.scheduler.cache.allocate(3)  # three pages go astray
    harness.add(list(range(10, 30)), max_tokens=2)
    harness.run()
    harness.check_outputs()
    assert "3 pages" not in caplog.text
    assert "61 of 64 pages are available" in caplog.text
    assert harness.scheduler.cache.num_available_pages == 64


def test_rows_with_one_prefix_share_it_once_and_own_the_rest() -> None:
    harness = Harness(
        sharing=ALWAYS_SHARE, mixed=False, max_running=8, num_pages=500, max_seq_len=80, max_prefill_tokens=500
    )
    for own in range(6):
        harness.add([*range(10, 26), 30 + own, 31], max_tokens=10, ignore_eos=True)
    harness.add([40, 41, 42], max_tokens=10, ignore_eos=True)
    harness.run()
    harness.check_outputs()
    shared = [step.shared for step in harness.engine.steps if step.shared is not None]
    assert {(*groups.num_rows.tolist(), *groups.num_pages.tolist()) for groups in shared} == {(6, 4)}
    assert len({groups.version for groups in shared}) == 1


def test_the_cut_that_saves_most_reads_is_chosen() -> None:
    """A short prefix that all rows have loses to two long ones that half of the rows have each."""
    harness = Harness(
        sharing=ALWAYS_SHARE, mixed=False, max_running=8, num_pages=500, max_seq_len=80, max_prefill_tokens=500
    )
    for own in range(6):
        stem = [10, 11, 12, 13] + [20 + own % 2] * 24
        harness.add([*stem, 30 + own], max_tokens=12, ignore_eos=True)
    harness.run()
    harness.check_outputs()
    groups = [step.shared for step in harness.engine.steps if step.num_decode == 6][-1]
    assert groups is not None
    assert (groups.num_rows.tolist(), groups.num_pages.tolist()) == ([3, 3], [7, 7])


def test_sharing_that_would_not_pay_is_left_alone() -> None:
    costs = SharingCosts(per_saved_token=1.0, base=100.0, per_row=1.0, per_prefix_token=1.0, min_rows=2)
    for num_rows, pays in ((2, False), (10, True)):
        harness = Harness(sharing=costs, mixed=False, max_running=16, num_pages=500, max_prefill_tokens=500)
        for own in range(num_rows):
            harness.add([*range(10, 26), 30 + own], max_tokens=4, ignore_eos=True)
        harness.run()
        harness.check_outputs()
        assert any(step.shared is not None for step in harness.engine.steps) == pays


def test_freed_slots_are_filled_together() -> None:
    """Rows that end one by one let new ones in by the handful, in few steps of pieces."""
    harness = Harness(mixed=False, max_running=64, num_pages=2000, max_prefill_tokens=4096, max_seq_len=256)
    for i in range(256):
        harness.add([10, i % 40 + 10], max_tokens=20 + i % 64, ignore_eos=True)
    harness.run()
    harness.check_outputs()
    prefills = [step for step in harness.engine.steps if step.num_decode == 0]
    assert len(prefills) <= 1 + 192 / 8 + 4
    assert all(step.is_decode or step.num_decode == 0 for step in harness.engine.steps)
