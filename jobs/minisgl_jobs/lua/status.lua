-- Reads all that is to say about a job in one moment. Changes nothing.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns false when there is no such job, else {the job's hash as fields and values, leases as chunk, worker, deadline
-- and number of spooled results each, what live workers say of themselves, 1 when the queue is paused, server time in ms, number of
-- spooled results of (the first of) the chunks that are to be handed out again}.

local job = ARGV[1]
local MAX_LOOKS = 100 -- chunks to hand out again whose spools are counted

local function num_spooled(chunk)
  local spool = spool_key(job, chunk)
  local num_batches = redis.call('HGET', spool, 'n')
  return num_batches and redis.call('HLEN', spool) - num_batches - 1 or 0
end

local fields = redis.call('HGETALL', job_key(job))
if #fields == 0 then
  return false
end
local leases = {}
local live = redis.call('HGETALL', job_key(job, 'live'))
for i = 1, #live, 2 do
  local chunk = live[i]
  local _, _, worker = string.match(live[i + 1], '^(%S+) (%S+) (.*)$')
  local deadline = redis.call('ZSCORE', key.lease, job .. '|' .. chunk) or '0'
  for _, value in ipairs({chunk, worker, deadline, num_spooled(chunk)}) do
    table.insert(leases, value)
  end
end
local num_waiting = 0
for _, chunk in ipairs(redis.call('LRANGE', job_key(job, 'todo'), 0, MAX_LOOKS - 1)) do
  num_waiting = num_waiting + num_spooled(chunk)
end
local infos = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', key.workers, now_ms, '+inf')) do
  table.insert(infos, redis.call('MGET', worker_key(worker))[1] or '') -- unlike GET it passes over what is no string
end
return {fields, leases, infos, redis.call('EXISTS', key.paused), now_ms, num_waiting}
