-- Lets a held job run, unless its time hasn't come.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns 'ok', 'again' (it isn't held any more), 'early' or 'gone'.

local job = ARGV[1]

write_when_full()
local fields = redis.call('HMGET', job_key(job), 'state', 'held', 'start_ms', 'priority')
local start_ms = tonumber(fields[3] or 0)
if not fields[1] then
  return 'gone'
elseif fields[1] ~= 'queued' or not fields[2] then
  return 'again'
elseif start_ms > now_ms then
  redis.call('ZADD', key.held, start_ms, job)
  return 'early'
end

redis.call('HSET', job_key(job), 'queued_at', now_ms)
redis.call('HDEL', job_key(job), 'held')
redis.call('ZADD', ring_key(fields[4]), now_us - 4e15, job)
redis.call('ZREM', key.held, job)
announce(job, 'queued')
ring_bell()
return 'ok'
