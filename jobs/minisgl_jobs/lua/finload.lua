-- Reads what finalise needs to know of a job. Changes nothing. (A transaction would be refused by a full Redis.)
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
--
-- Returns {the job's hash, its unconfirmed renames, both as fields and values; its chunks to hand out again}.

local job = ARGV[1]

return {
  redis.call('HGETALL', job_key(job)),
  redis.call('HGETALL', job_key(job, 'renames')),
  redis.call('LRANGE', job_key(job, 'todo'), 0, -1),
}
