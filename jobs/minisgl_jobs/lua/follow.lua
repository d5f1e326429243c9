-- Notes that another job waits for this one's end, so that it is told.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  follower  "queue job"
--
-- Returns the job's state, or false when there is no such job. A job that has ended notes nothing.

local job, follower = ARGV[1], ARGV[2]

local state = redis.call('HGET', job_key(job), 'state')
local is_noted = redis.call('SISMEMBER', job_key(job, 'followers'), follower) == 1 -- a full Redis lets us ask
if state and not is_final[state] and not is_noted then
  redis.call('SADD', job_key(job, 'followers'), follower)
  local ttl_ms = redis.call('PTTL', job_key(job))
  if ttl_ms > 0 then -- it is being submitted
    redis.call('PEXPIRE', job_key(job, 'followers'), ttl_ms)
  end
end
return state
