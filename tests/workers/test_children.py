"""Which of several failures a group is said to have died of."""

from __future__ import annotations

from minisgl_batch.child_process import ChildFailed
from minisgl_batch.errors import RankLostError
from minisgl_workers.children import Children


def test_a_rank_that_lost_another_one_is_not_the_cause() -> None:
    lost = RankLostError("another rank is gone")
    echo = ChildFailed(str(lost), True, lost.exit_code, at_s=1.0)
    killed = ChildFailed("rank 1 was killed by SIGKILL", False, 1, at_s=1.2)
    children = Children([], first_backoff_s=1.0, hang_s=1.0)
    children._fail([echo, killed])
    assert children.failure == killed
    children._fail([echo])
    assert children.failure == echo
