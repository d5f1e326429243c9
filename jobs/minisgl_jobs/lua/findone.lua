-- Gives a finalised job its last state. From here on all of its keys end by themselves.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  epoch     that was finalised
-- ARGV[3]  state     finished, partial, failed or canceled
-- ARGV[4]  ttl_ms
-- ARGV[5]  error     why it failed or was canceled, else ''
-- ARGV[6]  ok        rows that succeeded, and
-- ARGV[7]  errors    error rows, when they aren't those of the committed chunks
--
-- Returns 'done', 'again' (it has a last state) or 'stale' (another epoch, or not finalising).

local job, epoch, state, ttl_ms, why = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

write_when_full()
local fields = redis.call('HMGET', job_key(job), 'state', 'epoch')
if fields[2] ~= epoch then
  return 'stale'
elseif fields[1] ~= 'finalising' then
  return is_final[fields[1]] and 'again' or 'stale'
end

for _, chunk in ipairs(redis.call('LRANGE', job_key(job, 'todo'), 0, -1)) do
  redis.call('UNLINK', spool_key(job, chunk))
end
redis.call('UNLINK', job_key(job, 'todo'), job_key(job, 'poison'), job_key(job, 'renames'))
redis.call('HSET', job_key(job), 'finished_at', now_ms, 'error', why)
if ARGV[6] then
  redis.call('HSET', job_key(job), 'ok', ARGV[6], 'errors', ARGV[7])
end
set_state(job, state)
expire(job, ttl_ms)
redis.call('ZREM', key.fin, job)
expire_jobs_if_idle(ttl_ms)
if state ~= 'partial' then -- the others can't be retried
  redis.call('UNLINK', job_key(job, 'in'))
end
return 'done'
