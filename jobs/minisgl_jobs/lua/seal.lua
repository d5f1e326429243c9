-- Puts a job whose chunks are all there into its ring: from here on it runs.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns 'ok', 'again' (it was sealed before), 'gone' or 'incomplete'.

local job = ARGV[1]

local fields = redis.call('HMGET', job_key(job), 'state', 'num_chunks', 'priority')
local state, num_chunks, priority = fields[1], tonumber(fields[2]), fields[3]
if not state then
  return 'gone'
elseif state ~= 'submitting' then
  return 'again'
elseif redis.call('HLEN', job_key(job, 'in')) ~= num_chunks then
  return 'incomplete'
end

persist(job)
redis.call('HSET', job_key(job), 'queued_at', now_ms)
set_state(job, 'queued')
-- Negative: before all jobs that had a turn, after the new ones that came earlier.
redis.call('ZADD', ring_key(priority), now_us - 4e15, job)
ring_bell()
return 'ok'
