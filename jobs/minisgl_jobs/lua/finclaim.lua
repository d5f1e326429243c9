-- Leases the entry of the outbox that is due: its job is to be finalised by the caller, or again after `ttl_ms`.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  ttl_ms
--
-- Returns {job, epoch} or false.

local ttl_ms = tonumber(ARGV[1])

write_when_full()
while true do
  local job = redis.call('ZRANGEBYSCORE', key.fin, '-inf', now_ms, 'LIMIT', 0, 1)[1]
  if not job then
    return false
  end
  local fields, damage = guarded(redis.call, 'HMGET', job_key(job), 'state', 'epoch')
  if damage or (fields[1] == 'finalising' and not string.match(fields[2] or '', '^%d+$')) then
    fail_damaged(job, damage or 'its epoch is no number')
  elseif fields[1] == 'finalising' then
    redis.call('ZADD', key.fin, now_ms + ttl_ms, job)
    return {job, fields[2]}
  end
  redis.call('ZREM', key.fin, job) -- a damaged one is failed
end
