-- Marks chunks of a job that is being submitted as done: their parts are in its output already.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  ttl_ms
-- ARGV[3...]         chunks, and the number of error rows in the part of each
--
-- Returns 'ok', 'gone' (no such job, or it has ended by itself) or 'sealed'.

local job, ttl_ms = ARGV[1], tonumber(ARGV[2])

local refusal = refusal_to_add(job)
if refusal then
  return refusal
end

for i = 3, #ARGV, 2 do
  redis.call('SETBIT', job_key(job, 'done'), ARGV[i], 1)
  if tonumber(ARGV[i + 1]) > 0 then
    redis.call('HSET', job_key(job, 'bad'), ARGV[i], ARGV[i + 1])
  end
end
recount(job)
expire(job, ttl_ms)
expire_jobs_if_idle(ttl_ms)
return 'ok'
