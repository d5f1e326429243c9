-- Lists the newest jobs of a queue and forgets those whose records have ended.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  limit
--
-- Returns ids, newest first.

local limit = tonumber(ARGV[1])

local found = {}
for _, job in ipairs(redis.call('ZREVRANGE', key.jobs, 0, -1)) do
  if redis.call('EXISTS', job_key(job)) == 0 then
    redis.call('ZREM', key.jobs, job)
  else
    table.insert(found, job)
    if #found == limit then
      break
    end
  end
end
return found
