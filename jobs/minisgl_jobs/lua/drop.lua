-- Forgets a job that is being submitted, and all that was appended of it.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns 'ok', 'gone' or 'sealed' (it was submitted: nothing is changed).

local job = ARGV[1]

write_when_full()
local refusal = refusal_to_add(job)
if refusal then
  return refusal
end

for _, part in ipairs(job_parts) do
  redis.call('UNLINK', job_key(job, part))
end
redis.call('UNLINK', job_key(job))
redis.call('ZREM', key.jobs, job)
return 'ok'
