-- Extends leases. Never claims: a lease is extended only for its equal token, expired or not.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  lease_ms
-- ARGV[2...]         job, chunk, token; and so on
--
-- Returns for each chunk 'ok', 'lost' or 'cancel' (the job is being canceled; the lease goes on for the time being).

local lease_ms = tonumber(ARGV[1])

write_when_full()
note_activity(lease_ms)
local answers = {}
for i = 2, #ARGV, 3 do
  local job, chunk, token = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if holds(job, chunk, token) then
    redis.call('ZADD', key.lease, now_ms + lease_ms, job .. '|' .. chunk)
    local canceling = redis.call('HGET', job_key(job), 'state') == 'canceling'
    table.insert(answers, canceling and 'cancel' or 'ok')
  else
    table.insert(answers, 'lost')
  end
end
return answers
