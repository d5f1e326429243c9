-- Makes the record of a new job, in state `submitting`: it ends by itself unless it is appended to or sealed.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  digest    of what the job is; tells a repeated submit from another job of the same id
-- ARGV[3]  ttl_ms
-- ARGV[4...]         fields and values of the job's hash
--
-- Returns 'created', 'again' (it is being submitted), 'sealed' (it was submitted) or 'taken' (by another job).

local job, digest, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local found = redis.call('HMGET', job_key(job), 'digest', 'state')
if found[1] and found[1] ~= digest then
  return 'taken'
elseif found[1] and found[2] ~= 'submitting' then
  return 'sealed'
end

redis.call('HSET', job_key(job), 'state', 'submitting', 'digest', digest, unpack(ARGV, 4))
redis.call('HSETNX', job_key(job), 'created_at', now_ms)
redis.call('PEXPIRE', job_key(job), ttl_ms)
redis.call('ZADD', key.jobs, now_ms, job)
expire_jobs_if_idle(ttl_ms)
return found[1] and 'again' or 'created'
