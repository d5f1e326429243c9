-- Forgets a job that is being submitted, and all that was appended of it.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns 'ok', 'gone' or 'sealed' (it was submitted: nothing is changed).

local job = ARGV[1]

write_when_full()
local state = redis.call('HGET', job_key(job), 'state')
if not state then
  return 'gone'
elseif state ~= 'submitting' then
  return 'sealed'
end

redis.call('UNLINK', job_key(job, 'in'), job_key(job, 'followers'), job_key(job))
redis.call('ZREM', key.jobs, job)
return 'ok'
