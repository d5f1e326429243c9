-- Reads all that is to say about a job in one moment. Changes nothing.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns false when there is no such job, else {the job's hash as fields and values, leases as chunk, worker, deadline
-- and number of spooled results each, number of live workers, 1 when the queue is paused, server time in ms}.

local job = ARGV[1]

local fields = redis.call('HGETALL', job_key(job))
if #fields == 0 then
  return false
end
local leases = {}
local live = redis.call('HGETALL', job_key(job, 'live'))
for i = 1, #live, 2 do
  local chunk = live[i]
  local _, _, worker = string.match(live[i + 1], '^(%S+) (%S+) (.*)$')
  local spool = spool_key(job, chunk)
  local num_batches = redis.call('HGET', spool, 'n')
  local num_spooled = num_batches and redis.call('HLEN', spool) - num_batches - 1 or 0
  for _, value in ipairs({chunk, worker, redis.call('ZSCORE', key.lease, job .. '|' .. chunk) or '0', num_spooled}) do
    table.insert(leases, value)
  end
end
local num_workers = redis.call('ZCOUNT', key.workers, now_ms, '+inf')
return {fields, leases, num_workers, redis.call('EXISTS', key.paused), now_ms}
