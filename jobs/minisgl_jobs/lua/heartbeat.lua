-- Registers a worker for a while.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker
-- ARGV[2]  ttl_ms    0 ends the registration
-- ARGV[3]  info      what others may read about it

local worker, ttl_ms, info = ARGV[1], tonumber(ARGV[2]), ARGV[3]

write_when_full()
redis.call('ZREMRANGEBYSCORE', key.workers, '-inf', now_ms)
if ttl_ms == 0 then
  redis.call('ZREM', key.workers, worker)
  redis.call('DEL', worker_key(worker))
  return
end
redis.call('ZADD', key.workers, now_ms + ttl_ms, worker)
if redis.call('PTTL', key.workers) < ttl_ms then
  redis.call('PEXPIRE', key.workers, ttl_ms)
end
redis.call('SET', worker_key(worker), info, 'PX', ttl_ms)
