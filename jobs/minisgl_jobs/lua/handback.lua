-- Gives a chunk back, with its spooled rows and without counting a death: it is the next of its job to be handed out.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  chunk
-- ARGV[3]  token
-- ARGV[4]  reason    why the worker can't do it, '' when it could
--
-- Returns 'ok' or 'stale'.

local job, chunk, token, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

write_when_full()
if not holds(job, chunk, token) then
  return 'stale'
end
local fields = redis.call('HMGET', job_key(job), 'state', 'priority')
if fields[1] == 'canceling' then
  drop_canceled(job, chunk)
  return 'ok'
end

local poison = load_poison(job, chunk)
if poison.probe then
  poison.probe = nil
  save_poison(job, chunk, poison)
end
if reason ~= '' then
  redis.call('HSET', job_key(job), 'blocked', reason)
end
redis.call('LPUSH', job_key(job, 'todo'), chunk)
redis.call('ZADD', ring_key(fields[2]), 'NX', 0, job) -- 0: it has waited longest of those that had a turn
end_lease(job, chunk)
ring_bell()
return 'ok'
