-- Notes why a job can't be finalised at the moment.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  epoch
-- ARGV[3]  error

local job, epoch, why = ARGV[1], ARGV[2], ARGV[3]

write_when_full()
local fields = redis.call('HMGET', job_key(job), 'state', 'epoch')
if fields[1] == 'finalising' and fields[2] == epoch then
  redis.call('HSET', job_key(job), 'error', why)
end
