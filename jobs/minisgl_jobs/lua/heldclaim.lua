-- Leases the held job that is due for a look: the caller sees whether it may start, or another one does after `ttl_ms`.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  ttl_ms
--
-- Returns the job or false.

local ttl_ms = tonumber(ARGV[1])

write_when_full()
while true do
  local job = redis.call('ZRANGEBYSCORE', key.held, '-inf', now_ms, 'LIMIT', 0, 1)[1]
  if not job then
    return false
  end
  local fields, damage = guarded(redis.call, 'HMGET', job_key(job), 'state', 'held')
  if damage then
    fail_damaged(job, damage)
  elseif fields[1] == 'queued' and fields[2] then
    redis.call('ZADD', key.held, now_ms + ttl_ms, job)
    return job
  end
  redis.call('ZREM', key.held, job)
end
