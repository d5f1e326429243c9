-- What several scripts share; put before each of them by scripts.py, after the key names of keys.py.
--
-- Every script is one atomic step: it validates first and writes after, since Redis doesn't roll back. One thing tears
-- steps apart all the same: when a crash has cut the append-only file off inside a step, Redis (6.2 to 8, seen) passes it
-- over at the first start and runs its first half at the second. So counters are written as values, not as increments;
-- what can't be had back (payloads) goes last; and audit.lua repairs the rest.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

local MAX_GRACE_MS = 2000
local TICK_TTL_MS = 86400000
local BELL_TTL_MS = 3600000

-- A full Redis refuses commands that may need memory, unless the script has written before: scripts that keep or free
-- work begin with this, so that what is under way still drains.
local function write_when_full()
  redis.call('DEL', key.noop)
end

local function announce(job, state)
  redis.call('PUBLISH', job_key(job, 'events'), 'state ' .. state)
end

local function set_state(job, state)
  redis.call('HSET', job_key(job), 'state', state)
  announce(job, state)
end

-- Why nothing can be added to a job: 'gone' (no such job, or it has ended by itself) or 'sealed'; nil while it is being
-- submitted.
local function refusal_to_add(job)
  local state = redis.call('HGET', job_key(job), 'state')
  if not state then
    return 'gone'
  elseif state ~= 'submitting' then
    return 'sealed'
  end
end

local function ring_bell()
  redis.call('XADD', key.bell, 'MAXLEN', '~', 16, '*', 'rung', 1)
  redis.call('PEXPIRE', key.bell, BELL_TTL_MS)
end

local function leave_ring(job)
  redis.call('ZREM', ring_key(redis.call('HGET', job_key(job), 'priority')), job)
  redis.call('ZREM', key.held, job)
end

local is_final = {finished = true, partial = true, failed = true, canceled = true}

-- The job's own key comes first here and last in expire: the audit goes by it.
local function persist(job)
  redis.call('PERSIST', job_key(job))
  for _, part in ipairs(job_parts) do
    redis.call('PERSIST', job_key(job, part))
  end
  redis.call('PERSIST', key.jobs)
end

-- The list of jobs lives as long as its longest-lived job; while any job is under way it has no end.
local function expire_jobs_if_idle(ttl_ms)
  local under_way = redis.call('ZCARD', key.lease) + redis.call('ZCARD', key.fin) + redis.call('ZCARD', key.held)
  for _, priority in ipairs({'high', 'normal', 'low'}) do
    under_way = under_way + redis.call('ZCARD', ring_key(priority))
  end
  if under_way == 0 and redis.call('PTTL', key.jobs) < ttl_ms then
    redis.call('PEXPIRE', key.jobs, ttl_ms)
  end
end

-- The token, attempt and worker that hold a chunk; nil when nobody does.
local function holder(job, chunk)
  local live = redis.call('HGET', job_key(job, 'live'), chunk)
  if live then
    return string.match(live, '^(%S+) (%S+) (.*)$')
  end
end

local function holds(job, chunk, token)
  local held = holder(job, chunk)
  return held ~= nil and held == token
end

local function end_lease(job, chunk)
  redis.call('ZREM', key.lease, job .. '|' .. chunk)
  redis.call('HDEL', job_key(job, 'live'), chunk)
end

local function rows_of_chunk(rows, chunk_rows, chunk)
  return math.min(tonumber(chunk_rows), tonumber(rows) - tonumber(chunk) * tonumber(chunk_rows))
end

local function is_done(job, chunk)
  return redis.call('GETBIT', job_key(job, 'done'), chunk) == 1
end

-- The counters, from what they count.
local function recount(job)
  local fields = redis.call('HMGET', job_key(job), 'rows', 'chunk_rows', 'num_chunks', 'left_out')
  local rows, chunk_rows, last = tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3]) - 1
  local done = redis.call('BITCOUNT', job_key(job, 'done'))
  local counted = done * chunk_rows
  if is_done(job, last) then
    counted = counted - chunk_rows + rows_of_chunk(rows, chunk_rows, last)
  end
  local errors = 0
  local bad = redis.call('HGETALL', job_key(job, 'bad'))
  for i = 1, #bad, 2 do
    errors = errors + bad[i + 1]
    if not is_done(job, bad[i]) then -- to be retried: its old part still counts
      counted = counted + rows_of_chunk(rows, chunk_rows, bad[i])
    end
  end
  local ok = counted - errors - tonumber(fields[4] or 0)
  redis.call('HSET', job_key(job), 'done', done, 'ok', ok, 'errors', errors)
end

-- The outbox entry is written in the same step as the state, so that finalise can't be forgotten.
local function to_finalising(job)
  recount(job)
  redis.call('ZADD', key.fin, now_ms, job)
  leave_ring(job)
  set_state(job, 'finalising')
  ring_bell()
end

-- A job is over when all of its chunks are done, a canceled one when nobody works on a chunk any more.
local function finalise_when_over(job)
  local fields = redis.call('HMGET', job_key(job), 'state', 'num_chunks')
  local all_done = redis.call('BITCOUNT', job_key(job, 'done')) == tonumber(fields[2])
  if (all_done or fields[1] == 'canceling') and redis.call('HLEN', job_key(job, 'live')) == 0 then
    to_finalising(job)
  end
end

-- Ends the lease of a canceled job's chunk; finalise looks for rows in the spools of the chunks in `todo`.
local function drop_canceled(job, chunk)
  if redis.call('HEXISTS', spool_key(job, chunk), 'n') == 1 then
    redis.call('RPUSH', job_key(job, 'todo'), chunk)
  else
    redis.call('UNLINK', spool_key(job, chunk)) -- it tells of rows that are on disk
  end
  end_lease(job, chunk)
  finalise_when_over(job)
end

local function expire(job, ttl_ms)
  for _, part in ipairs(job_parts) do
    redis.call('PEXPIRE', job_key(job, part), ttl_ms)
  end
  redis.call('PEXPIRE', job_key(job), ttl_ms)
end

-- Redis holds what anybody has put there. A step on one job's records that meets another type or no number says so in
-- its second answer; every other error goes on.
local DAMAGE = {
  'WRONGTYPE', 'not an integer', 'not a valid float', 'bit offset', 'attempt to', 'bad argument', 'Expected ',
  'no count of chunks',
}
local function guarded(step, ...)
  local went_well, answer = pcall(step, ...)
  if went_well then
    return answer
  end
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  for _, sign in ipairs(DAMAGE) do
    if string.find(why, sign, 1, true) then
      return nil, why
    end
  end
  error(answer, 0)
end

-- The numbers of chunks handed out once and in all. Scripts loop over them, and nothing else runs meanwhile.
local MAX_CHUNKS = 10000000
local function chunk_counts(next_, num_chunks)
  local first, last = tonumber(next_), tonumber(num_chunks)
  if not (first and last and first >= 0 and first <= last and last <= MAX_CHUNKS and first % 1 == 0) then
    error(tostring(next_) .. ' of ' .. tostring(num_chunks) .. ' is no count of chunks', 0)
  end
  return first, last
end

-- Takes a job with damaged records out of the queue, as failed where that can be written. All of its keys end by
-- themselves.
local DAMAGED_TTL_MS = 7 * 86400000
local function fail_damaged(job, why)
  for _, priority in ipairs({'high', 'normal', 'low'}) do
    redis.call('ZREM', ring_key(priority), job)
  end
  redis.call('ZREM', key.held, job)
  redis.call('ZREM', key.fin, job)
  for _, member in ipairs(redis.call('ZRANGE', key.lease, 0, -1)) do
    if string.sub(member, 1, #job + 1) == job .. '|' then
      redis.call('ZREM', key.lease, member)
      redis.call('PEXPIRE', spool_key(job, string.sub(member, #job + 2)), DAMAGED_TTL_MS)
    end
  end
  local todo = redis.pcall('LRANGE', job_key(job, 'todo'), 0, -1)
  for _, chunk in ipairs(todo) do -- none in an error
    redis.call('PEXPIRE', spool_key(job, chunk), DAMAGED_TTL_MS)
  end
  redis.call('UNLINK', job_key(job, 'live'), job_key(job, 'todo'))
  local state = redis.pcall('HGET', job_key(job), 'state')
  if type(state) == 'table' then
    redis.call('ZREM', key.jobs, job)
  elseif state and not is_final[state] then
    redis.call('HSET', job_key(job), 'error', why, 'finished_at', now_ms)
    set_state(job, 'failed')
  end
  expire(job, DAMAGED_TTL_MS)
  expire_jobs_if_idle(DAMAGED_TTL_MS)
end

-- After an outage every lease looks expired. When no worker was seen for longer than renewals are apart, those that
-- live get some time to renew before anybody takes over. `grace` outlives its own end by a lease, so that one silence
-- can't start it twice.
local function note_activity(lease_ms)
  local seen = tonumber(redis.pcall('GET', key.tick)) or 0
  if now_ms - seen > lease_ms / 2 and redis.call('ZCARD', key.lease) > 0 and redis.call('EXISTS', key.grace) == 0 then
    local grace_ms = math.min(MAX_GRACE_MS, lease_ms)
    redis.call('SET', key.grace, now_ms + grace_ms, 'PX', grace_ms + lease_ms)
  end
  redis.call('SET', key.tick, now_ms, 'PX', TICK_TTL_MS)
end

-- deaths: takeovers of the chunk; probe: the rows [start, stop) that run now, alone; suspect: those that ran when the
-- last worker died; rows: deaths of a row that ran alone.
local function load_poison(job, chunk)
  local text = redis.call('HGET', job_key(job, 'poison'), chunk)
  return text and cjson.decode(text) or {deaths = 0, rows = {}}
end

local function save_poison(job, chunk, poison)
  redis.call('HSET', job_key(job, 'poison'), chunk, cjson.encode(poison))
end
