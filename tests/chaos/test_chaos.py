"""The short form of `make chaos`: each kind of process is struck, and the job comes out whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.attack import Attack, after_their_end, check
from tests.chaos.world import World


@pytest.mark.chaos
def test_rows_out_are_rows_in_whatever_dies(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    folder: Path = tmp_path_factory.mktemp("chaos")
    transport = rng.choice(["--by-value", "--by-reference"])
    with World(folder, num_rows=2500, chunk_rows=32, lease_s=1.5, step_s=0.02, transport=transport) as world:
        attack = Attack(world, rng, num_rounds=1, num_restarts=1, pause_s=1.0, end_s=200)
        summary = attack.run()
        print("\n".join([*attack.timeline, *map(str, after_their_end(world, world.begun))]))
    check(summary)
