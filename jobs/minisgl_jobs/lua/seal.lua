-- Puts a job whose chunks are all there into its ring: from here on it runs. Or holds it until `release`.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  after     the job that it is to follow, or ''
-- ARGV[3]  start_ms  when it may start, server ms; 0: at once
-- ARGV[4]  look_ms   how long from now to look again whether a job it follows has ended, should nobody tell
--
-- Returns 'ok', 'again' (it was sealed before), 'gone' or 'incomplete'.

local job, after, start_ms, look_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local fields = redis.call('HMGET', job_key(job), 'state', 'num_chunks', 'priority')
local state, num_chunks, priority = fields[1], tonumber(fields[2]), fields[3]
if not state then
  return 'gone'
elseif state ~= 'submitting' then
  return 'again'
end
local num_done, num_bad = redis.call('BITCOUNT', job_key(job, 'done')), redis.call('HLEN', job_key(job, 'bad'))
if redis.call('HLEN', job_key(job, 'in')) ~= num_chunks - num_done + num_bad then
  return 'incomplete'
end

persist(job)
if num_done == num_chunks then -- a resumed job whose parts are all there
  redis.call('HSET', job_key(job), 'queued_at', now_ms, 'state', 'queued')
  finalise_when_over(job)
  return 'ok'
end
if after ~= '' or start_ms > now_ms then
  redis.call('HSET', job_key(job), 'held', 1, 'after', after, 'start_ms', start_ms, 'state', 'queued')
  redis.call('ZADD', key.held, after ~= '' and now_ms + look_ms or start_ms, job)
else
  redis.call('HSET', job_key(job), 'queued_at', now_ms, 'state', 'queued')
  -- Negative: before all jobs that had a turn, after the new ones that came earlier.
  redis.call('ZADD', ring_key(priority), now_us - 4e15, job)
  ring_bell()
end
announce(job, 'queued')
return 'ok'
