"""Names of queues and keys."""

from __future__ import annotations

import random
import re

import redis

from minisgl_jobs.keys import EVENTS, JOB_PARTS, QUEUE_PARTS, STREAM_PARTS, QueueKeys, lua_names, queue_name


def test_queue_names_are_readable_safe_and_different(rng: random.Random) -> None:
    assert queue_name("demo") == "demo"
    assert re.fullmatch(r"Qwen-Qwen3-14B-[0-9a-f]{8}", queue_name("Qwen/Qwen3-14B"))
    models = {"a/b", "a-b", "a b", "a:b", "a{b}", "a|b", "", "/", "é", "x" * 500, "x" * 501}
    models |= {"".join(rng.choices("ab/-{}:| é", k=rng.randrange(1, 6))) for _ in range(500)}
    names = {model: queue_name(model) for model in models}
    assert len(set(names.values())) == len(models)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,73}", name) for name in names.values())


def test_lua_and_python_make_the_same_names(client: redis.Redis) -> None:
    keys = QueueKeys("q")
    calls = {f"key.{part}": keys.part(part) for part in QUEUE_PARTS}
    calls |= {f"job_key('j', '{part}')": keys.job("j", part) for part in (*JOB_PARTS, *STREAM_PARTS, EVENTS)}
    calls |= {
        "job_key('j')": keys.job("j"),
        "spool_key('j', '7')": keys.spool("j", 7),
        "ring_key('high')": keys.ring("high"),
        "turn_key('high')": keys.turn("high"),
        "take_key('w')": keys.last_take("w"),
        "worker_key('w')": keys.worker("w"),
    }
    made = client.eval(f"{lua_names()}\nreturn {{{', '.join(calls)}}}", 1, keys.prefix)
    assert [name.decode() for name in made] == list(calls.values())
    parts = client.eval(f"{lua_names()}\nreturn job_parts", 1, keys.prefix)
    assert [part.decode() for part in parts] == list(JOB_PARTS)
