-- Commits a chunk whose part is on disk: counts its rows and frees what was kept for it.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  chunk
-- ARGV[3]  token
-- ARGV[4]  ok        rows that succeeded
-- ARGV[5]  errors    error rows; together all rows of the chunk, or fewer when the job is being canceled
--
-- Returns 'committed', 'again' (the owner repeats itself), 'stale' (it is somebody else's) or 'miscounted'.

local job, chunk, token, ok, errors = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

write_when_full()
if not holds(job, chunk, token) then
  local committed = redis.call('HGET', job_key(job, 'renames'), chunk)
  return committed and string.match(committed, '^(%S+)') == token and 'again' or 'stale'
end
local fields = redis.call(
  'HMGET', job_key(job), 'state', 'epoch', 'rows', 'chunk_rows', 'ok', 'errors', 'left_out'
)
local state, epoch = fields[1], fields[2]
local num_rows = rows_of_chunk(fields[3], fields[4], chunk)
local left_out = num_rows - ok - errors
if left_out < 0 or (left_out > 0 and state ~= 'canceling') then
  return 'miscounted'
end

local old_errors = redis.call('HGET', job_key(job, 'bad'), chunk)
local old_ok = old_errors and num_rows - old_errors or 0 -- a retried chunk was counted before
if errors > 0 then
  redis.call('HSET', job_key(job, 'bad'), chunk, errors)
else
  redis.call('HDEL', job_key(job, 'bad'), chunk)
end
redis.call('HSET', job_key(job, 'renames'), chunk, token .. ' ' .. epoch)
redis.call('SETBIT', job_key(job, 'done'), chunk, 1)
redis.call(
  'HSET', job_key(job),
  'done', redis.call('BITCOUNT', job_key(job, 'done')),
  'ok', fields[5] + ok - old_ok,
  'errors', fields[6] + errors - (old_errors or 0),
  'left_out', (fields[7] or 0) + left_out
)
redis.call('UNLINK', spool_key(job, chunk))
redis.call('HDEL', job_key(job, 'poison'), chunk)
end_lease(job, chunk)
finalise_when_over(job)
if errors == 0 then -- only chunks with error rows may run again
  redis.call('HDEL', job_key(job, 'in'), chunk)
end
return 'committed'
