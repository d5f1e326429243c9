-- Hands one chunk to a worker under a new lease.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  token     new and random; a repeated call with the same token gets the same chunk
-- ARGV[2]  worker
-- ARGV[3]  lease_ms
-- ARGV[4]  schema    version of the job records that this worker reads
-- ARGV[5]  engine    JSON about this worker's engine, kept with the jobs that it has chunks of
-- ARGV[6...]         jobs that this worker can't do at the moment
--
-- Returns {'none', ms until the next lease ends, or -1}
-- or {'damaged', job, why}: the job is failed now, and there may be others
-- or {'lease', job, chunk, attempt, epoch, spec, payload, poison, spool as fields and values, the job's engines so far as
-- lines}.

local token, worker, lease_ms, schema, engine = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local avoid, num_avoided = {}, #ARGV - 5
for i = 6, #ARGV do
  avoid[ARGV[i]] = true
end
local REPEAT_TTL_MS = 60000
local MAX_LOOKS = 64 -- entries that can't be handed out, in one call; the next call goes on

local function describe(job, chunk, attempt)
  local fields = redis.call('HMGET', job_key(job), 'epoch', 'spec', 'engines')
  return {
    'lease', job, chunk, attempt, fields[1], fields[2],
    redis.call('HGET', job_key(job, 'in'), chunk) or '',
    redis.call('HGET', job_key(job, 'poison'), chunk) or '',
    redis.call('HGETALL', spool_key(job, chunk)),
    fields[3] or '',
  }
end

local function note_engine(job)
  local engines = redis.call('HGET', job_key(job), 'engines') or ''
  if not string.find('\n' .. engines, '\n' .. engine .. '\n', 1, true) then
    redis.call('HSET', job_key(job), 'engines', engines .. engine .. '\n')
  end
end

-- The attempt orders the runs of a chunk for readers of its tokens: time, so that it grows after a loss of data too.
local function grant(job, chunk)
  local attempt = string.format('%.0f', now_us)
  redis.call('HSET', job_key(job, 'live'), chunk, token .. ' ' .. attempt .. ' ' .. worker)
  redis.call('ZADD', key.lease, now_ms + lease_ms, job .. '|' .. chunk)
  redis.call('HDEL', job_key(job), 'blocked')
  note_engine(job)
  redis.call('SET', take_key(worker), token .. ' ' .. job .. ' ' .. chunk, 'PX', REPEAT_TTL_MS)
  return describe(job, chunk, attempt)
end

-- What a step on a job answers, or that its records are damaged.
local function step_on(job, step, ...)
  local answer, damage = guarded(step, job, ...)
  if damage then
    fail_damaged(job, damage)
    return {'damaged', job, damage}
  end
  return answer
end

local function describe_held(job, chunk)
  if holds(job, chunk, token) then
    local _, attempt = holder(job, chunk)
    return describe(job, chunk, attempt)
  end
end

local function taken_before()
  local last = redis.call('GET', take_key(worker))
  if last then
    local last_token, job, chunk = string.match(last, '^(%S+) (%S+) (%S+)$')
    if last_token == token then
      return step_on(job, describe_held, chunk)
    end
  end
end

local function count_death(job, chunk)
  local poison = load_poison(job, chunk)
  poison.deaths = poison.deaths + 1
  if poison.probe then
    local start, stop = poison.probe[1], poison.probe[2]
    poison.suspect, poison.probe = poison.probe, nil
    if stop - start == 1 then
      local row = string.format('%.0f', start)
      poison.rows[row] = (poison.rows[row] or 0) + 1
    end
  end
  save_poison(job, chunk, poison)
  redis.call('HINCRBY', job_key(job), 'deaths', 1)
end

local function take_over_chunk(job, chunk, paused)
  local fields = redis.call('HMGET', job_key(job), 'state', 'schema')
  if not holder(job, chunk) then
    redis.call('ZREM', key.lease, job .. '|' .. chunk)
  elseif is_done(job, chunk) then -- the second half of its completion was lost
    redis.call('UNLINK', spool_key(job, chunk))
    redis.call('HDEL', job_key(job, 'poison'), chunk)
    end_lease(job, chunk)
    finalise_when_over(job)
  elseif fields[1] == 'canceling' then
    drop_canceled(job, chunk)
  elseif fields[1] == 'running' and fields[2] == schema and not paused and not avoid[job] then
    count_death(job, chunk)
    return grant(job, chunk)
  end
end

local function take_over(paused)
  if (tonumber(redis.pcall('GET', key.grace)) or 0) > now_ms then
    return nil
  end
  local expired = redis.call('ZRANGEBYSCORE', key.lease, '-inf', now_ms, 'LIMIT', 0, MAX_LOOKS)
  for _, member in ipairs(expired) do
    local job, chunk = string.match(member, '^(.*)|(%d+)$')
    local taken = nil
    if job then
      taken = step_on(job, take_over_chunk, chunk, paused)
    else
      redis.call('ZREM', key.lease, member)
    end
    if taken then
      return taken
    end
  end
end

-- The first job of a ring that this worker can do, from a score on, and its score.
local function first_from(priority, score)
  local found = redis.call(
    'ZRANGEBYSCORE', ring_key(priority), score, '+inf', 'WITHSCORES', 'LIMIT', 0, num_avoided + 1
  )
  for i = 1, #found, 2 do
    if not avoid[found[i]] then
      return found[i], tonumber(found[i + 1])
    end
  end
end

-- The job whose turn it is. A new job goes to the front, but after a new one comes the old one that waited longest, so
-- that a flood of small jobs can't hold back a big one.
local function next_job(priority)
  local job, score = first_from(priority, '-inf')
  local is_new = job and score < 0
  if is_new and redis.call('EXISTS', turn_key(priority)) == 1 then
    local old = first_from(priority, 0)
    if old then
      return old, false
    end
  end
  return job, is_new
end

local function is_free(job, chunk)
  return not is_done(job, chunk) and redis.call('HEXISTS', job_key(job, 'live'), chunk) == 0
end

-- The next chunk that nobody works on, and the chunk that is handed out for the first time after it.
local function choose(job, next_, num_chunks)
  local todo = job_key(job, 'todo')
  local chunk = redis.call('LINDEX', todo, 0)
  while chunk do
    if is_free(job, chunk) then
      return chunk, next_
    end
    redis.call('LPOP', todo)
    chunk = redis.call('LINDEX', todo, 0)
  end
  while next_ < num_chunks do
    next_ = next_ + 1
    if is_free(job, next_ - 1) then
      return tostring(next_ - 1), next_
    end
  end
  return nil, next_
end

-- Hands out the job's next chunk and moves the job in its ring, or out of it; nil when it has none for this worker.
local function take_from(job, priority, is_new)
  local fields = redis.call('HMGET', job_key(job), 'state', 'schema', 'next', 'num_chunks')
  local state = fields[1]
  if state ~= 'queued' and state ~= 'running' then
    redis.call('ZREM', ring_key(priority), job)
    return nil
  elseif fields[2] ~= schema then
    redis.call('ZADD', ring_key(priority), now_us, job)
    redis.call('DEL', turn_key(priority)) -- it had its turn: new jobs are not to wait for it
    return nil
  end
  local chosen_from, num_chunks = chunk_counts(fields[3], fields[4])
  local chunk, next_ = choose(job, chosen_from, num_chunks)
  local taken = chunk and grant(job, chunk)
  if chunk and chunk == redis.call('LINDEX', job_key(job, 'todo'), 0) then
    redis.call('LPOP', job_key(job, 'todo'))
  else
    redis.call('HSET', job_key(job), 'next', next_)
  end
  if next_ < num_chunks or redis.call('EXISTS', job_key(job, 'todo')) == 1 then
    redis.call('ZADD', ring_key(priority), now_us, job)
  else
    redis.call('ZREM', ring_key(priority), job)
  end
  if is_new then
    redis.call('SET', turn_key(priority), 1, 'PX', TICK_TTL_MS)
  else
    redis.call('DEL', turn_key(priority))
  end
  if taken and state == 'queued' then
    redis.call('HSETNX', job_key(job), 'started_at', now_ms)
    set_state(job, 'running')
  end
  return taken
end

local function take_new()
  for _, priority in ipairs({'high', 'normal', 'low'}) do
    for _ = 1, MAX_LOOKS do
      local job, is_new = next_job(priority)
      if not job then
        break
      end
      local taken = step_on(job, take_from, priority, is_new)
      if taken then
        return taken
      end
    end
  end
end

write_when_full()
note_activity(lease_ms)
local paused = redis.call('EXISTS', key.paused) == 1
local taken = taken_before() or take_over(paused) or (not paused and take_new())
if taken then
  return taken
end
local next_end = redis.call('ZRANGE', key.lease, 0, 0, 'WITHSCORES')[2]
return {'none', next_end and math.max(0, tonumber(next_end) - now_ms) or -1}
