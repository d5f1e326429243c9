-- Stops a job: nothing of it is handed out any more, and it is finalised when no worker holds a chunk of it. Called
-- again, it ends leases that have run out meanwhile, for queues that no worker looks after any more.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  why       '' when a user wished it
--
-- Returns the state that the job was in before, 'canceling' also when it is finalised as a canceled one by now, or false
-- when there is no such job. A job that is finalised with all of its rows is too far to stop; one whose records are
-- damaged is failed at once.

local job, why = ARGV[1], ARGV[2]
local known = {submitting = true, queued = true, running = true, canceling = true, finalising = true}

local function cancel()
  local state = redis.call('HGET', job_key(job), 'state')
  if state == 'submitting' or state == 'queued' or state == 'running' then
    persist(job)
    leave_ring(job)
    redis.call('HSET', job_key(job), 'canceled', why, 'state', 'canceling')
    announce(job, 'canceling')
    finalise_when_over(job)
  elseif state == 'canceling' then
    for _, chunk in ipairs(redis.call('HKEYS', job_key(job, 'live'))) do
      local deadline = redis.call('ZSCORE', key.lease, job .. '|' .. chunk)
      if not deadline or tonumber(deadline) < now_ms then
        drop_canceled(job, chunk)
      end
    end
  end
  if state == 'finalising' and redis.call('HEXISTS', job_key(job), 'canceled') == 1 then
    return 'canceling'
  end
  return state
end

write_when_full()
local state, damage = guarded(cancel)
if damage or (state and not known[state] and not is_final[state]) then
  fail_damaged(job, damage or 'its state is none')
  return 'canceling'
end
return state
