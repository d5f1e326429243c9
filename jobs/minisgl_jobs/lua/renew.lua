-- Extends leases. Never claims: a lease is extended only for its equal token, expired or not.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  lease_ms
-- ARGV[2...]         job, chunk, token; and so on
--
-- Returns for each chunk 'ok', 'lost' or 'cancel' (the job is being canceled; the lease goes on for the time being), or
-- 'damaged why': the job is failed now.

local lease_ms = tonumber(ARGV[1])

local function renew(job, chunk, token)
  if not holds(job, chunk, token) then
    return 'lost'
  end
  redis.call('ZADD', key.lease, now_ms + lease_ms, job .. '|' .. chunk)
  return redis.call('HGET', job_key(job), 'state') == 'canceling' and 'cancel' or 'ok'
end

write_when_full()
note_activity(lease_ms)
local answers = {}
for i = 2, #ARGV, 3 do
  local answer, damage = guarded(renew, ARGV[i], ARGV[i + 1], ARGV[i + 2])
  if damage then
    fail_damaged(ARGV[i], damage)
    answer = 'damaged ' .. damage
  end
  table.insert(answers, answer)
end
return answers
