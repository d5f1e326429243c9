-- Reads all that is to say about a job in one moment. Changes nothing.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns false when there is no such job, else {the job's hash as fields and values, leases as chunk, worker, deadline
-- and numbers of spooled results and of rows that are finished and not counted yet each, what live workers say of
-- themselves, 1 when the queue is paused, server time in ms, the same two numbers of (the first of) the chunks that are
-- to be handed out again}.

local job = ARGV[1]
local MAX_LOOKS = 100 -- chunks to hand out again whose spools are counted

local function spooled(chunk)
  local spool = spool_key(job, chunk)
  local found = redis.call('HMGET', spool, 'n', 'rows')
  if not found[2] then
    return 0, 0
  end
  local num_results = found[1] and redis.call('HLEN', spool) - found[1] - 2 or 0
  local old_errors = redis.call('HGET', job_key(job, 'bad'), chunk)
  if not old_errors then
    return num_results, tonumber(found[2])
  end
  local of_job = redis.call('HMGET', job_key(job), 'rows', 'chunk_rows') -- a retried chunk's old part still counts
  return num_results, math.max(0, found[2] - rows_of_chunk(of_job[1], of_job[2], chunk) + old_errors)
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
  for _, value in ipairs({chunk, worker, deadline, spooled(chunk)}) do
    table.insert(leases, value)
  end
end
local num_waiting, rows_waiting = 0, 0
for _, chunk in ipairs(redis.call('LRANGE', job_key(job, 'todo'), 0, MAX_LOOKS - 1)) do
  local num_results, num_rows = spooled(chunk)
  num_waiting, rows_waiting = num_waiting + num_results, rows_waiting + num_rows
end
local infos = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', key.workers, now_ms, '+inf')) do
  table.insert(infos, redis.call('MGET', worker_key(worker))[1] or '') -- unlike GET it passes over what is no string
end
return {fields, leases, infos, redis.call('EXISTS', key.paused), now_ms, num_waiting, rows_waiting}
