-- Confirms that committed parts have their final names.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2...]         chunk, token; and so on
--
-- Returns the number of records that were confirmed now.

local job = ARGV[1]

write_when_full()
local num_confirmed = 0
for i = 2, #ARGV, 2 do
  local chunk, token = ARGV[i], ARGV[i + 1]
  local committed = redis.call('HGET', job_key(job, 'renames'), chunk)
  if committed and string.match(committed, '^(%S+)') == token then
    num_confirmed = num_confirmed + redis.call('HDEL', job_key(job, 'renames'), chunk)
  end
end
return num_confirmed
