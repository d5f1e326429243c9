-- Forgets a job that has ended: all of its keys.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns the state that it was in (nothing is changed unless that is a final one), or false when there is no such job.

local job = ARGV[1]

write_when_full()
local state = redis.pcall('HGET', job_key(job), 'state')
if type(state) == 'table' then -- it isn't a job's record
  fail_damaged(job, '')
  state = 'failed'
end
if state and is_final[state] then
  for _, part in ipairs(job_parts) do
    redis.call('UNLINK', job_key(job, part))
  end
  redis.call('UNLINK', job_key(job, 'tokens'), job_key(job, 'watch'))
  redis.call('ZREM', key.jobs, job)
  redis.call('UNLINK', job_key(job))
  announce(job, 'purged')
end
return state
