-- Opens the chunks with error rows of a partial job again, in a new epoch.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  epoch     that the caller has seen: a repeated call finds the next one and changes nothing
--
-- Returns {state before, epoch before}, or false when there is no such job.

local job, epoch = ARGV[1], ARGV[2]

local fields = redis.call('HMGET', job_key(job), 'state', 'epoch', 'priority')
local state = fields[1]
if not state then
  return false
elseif state == 'partial' and fields[2] == epoch then
  persist(job)
  local chunks = redis.call('HKEYS', job_key(job, 'bad'))
  table.sort(chunks, function(a, b) return tonumber(a) < tonumber(b) end)
  redis.call('HDEL', job_key(job), 'finished_at')
  redis.call('HSET', job_key(job), 'state', 'queued', 'epoch', epoch + 1, 'queued_at', now_ms)
  for _, chunk in ipairs(chunks) do
    redis.call('SETBIT', job_key(job, 'done'), chunk, 0)
    redis.call('RPUSH', job_key(job, 'todo'), chunk)
  end
  redis.call('HSET', job_key(job), 'done', redis.call('BITCOUNT', job_key(job, 'done')))
  redis.call('ZADD', ring_key(fields[3]), now_us - 4e15, job)
  announce(job, 'queued')
  ring_bell()
end
return {state, fields[2]}
