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

for _, part in ipairs(job_parts) do
  redis.call('UNLINK', job_key(job, part))
end
redis.call('UNLINK', job_key(job))
redis.call('ZREM', key.jobs, job)
return 'ok'
