-- Adds chunks' payloads to a job that is being submitted, and lets it live on.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  ttl_ms
-- ARGV[3...]         chunks and payloads
--
-- Returns 'ok', 'gone' (no such job, or it has ended by itself) or 'sealed'.

local job, ttl_ms = ARGV[1], tonumber(ARGV[2])

local refusal = refusal_to_add(job)
if refusal then
  return refusal
end

redis.call('HSET', job_key(job, 'in'), unpack(ARGV, 3))
expire(job, ttl_ms)
expire_jobs_if_idle(ttl_ms)
return 'ok'
