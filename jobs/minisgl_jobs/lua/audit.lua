-- Repairs what a loss of data has torn apart (see prelude.lua): no chunk and no job stays forgotten. In a sound queue it
-- changes nothing. Workers run it now and then.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  lease_ms
-- ARGV[2]  ttl_ms    for ended jobs that have no end of their own
--
-- Returns {the number of chunks and jobs that were found again, then job and reason of each that is failed now, since
-- its records are damaged}.

local lease_ms, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local num_found = 0

local function restore_leases(job)
  for _, chunk in ipairs(redis.call('HKEYS', job_key(job, 'live'))) do
    num_found = num_found + redis.call('ZADD', key.lease, 'NX', now_ms + lease_ms, job .. '|' .. chunk)
  end
end

-- Chunks that were handed out once, and which nobody has, has done or will get.
local function restore_chunks(job, next_)
  local todo = {}
  for _, chunk in ipairs(redis.call('LRANGE', job_key(job, 'todo'), 0, -1)) do
    todo[tonumber(chunk)] = true
  end
  for chunk = 0, next_ - 1 do
    if not todo[chunk] and not is_done(job, chunk) and redis.call('HEXISTS', job_key(job, 'live'), chunk) == 0 then
      redis.call('RPUSH', job_key(job, 'todo'), chunk)
      num_found = num_found + 1
    end
  end
end

local function restore_turn(job)
  if redis.call('HEXISTS', job_key(job), 'held') == 1 then
    num_found = num_found + redis.call('ZADD', key.held, 'NX', now_ms, job)
    return
  end
  local fields = redis.call('HMGET', job_key(job), 'priority', 'next', 'num_chunks')
  local next_, num_chunks = chunk_counts(fields[2], fields[3])
  local num_live, num_todo = redis.call('HLEN', job_key(job, 'live')), redis.call('LLEN', job_key(job, 'todo'))
  local num_known = redis.call('BITCOUNT', job_key(job, 'done')) + num_live + num_todo
  if num_known < next_ or (next_ == num_chunks and num_live + num_todo == 0) then
    restore_chunks(job, next_)
  end
  if next_ < num_chunks or redis.call('EXISTS', job_key(job, 'todo')) == 1 then
    num_found = num_found + redis.call('ZADD', ring_key(fields[1]), 'NX', 0, job)
  end
end

local function repair(job)
  local state = redis.call('HGET', job_key(job), 'state')
  if state == 'submitting' or is_final[state] then
    if redis.call('PTTL', job_key(job)) == -1 then
      expire(job, ttl_ms)
    end
  elseif state then
    if redis.call('PTTL', job_key(job)) >= 0 or redis.call('PTTL', key.jobs) >= 0 then
      persist(job)
    end
    restore_leases(job)
    if state == 'finalising' then
      num_found = num_found + redis.call('ZADD', key.fin, 'NX', now_ms, job)
    else
      if state ~= 'canceling' then
        restore_turn(job)
      end
      finalise_when_over(job)
    end
  end
end

write_when_full()
local reply = {0}
for _, job in ipairs(redis.call('ZRANGE', key.jobs, 0, -1)) do
  local _, damage = guarded(repair, job)
  if damage then
    fail_damaged(job, damage)
    table.insert(reply, job)
    table.insert(reply, damage)
  end
end
expire_jobs_if_idle(ttl_ms)
if redis.call('PTTL', key.bell) == -1 then
  redis.call('PEXPIRE', key.bell, BELL_TTL_MS)
end
if num_found > 0 then
  ring_bell()
end
reply[1] = num_found
return reply
