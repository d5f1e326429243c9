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
local fields = redis.call('HMGET', job_key(job), 'state', 'epoch', 'rows', 'chunk_rows', 'num_chunks')
local state, epoch, num_chunks = fields[1], fields[2], tonumber(fields[5])
local num_rows = rows_of_chunk(fields[3], fields[4], chunk)
if ok + errors > num_rows or (ok + errors < num_rows and state ~= 'canceling') then
  return 'miscounted'
end

end_lease(job, chunk)
redis.call('UNLINK', spool_key(job, chunk))
redis.call('HDEL', job_key(job, 'poison'), chunk)
redis.call('SETBIT', job_key(job, 'done'), chunk, 1)
redis.call('HSET', job_key(job, 'renames'), chunk, token .. ' ' .. epoch)
local old_errors = redis.call('HGET', job_key(job, 'bad'), chunk)
if old_errors then -- retried: its rows were counted before
  ok = ok - (num_rows - old_errors)
end
redis.call('HINCRBY', job_key(job), 'ok', ok)
redis.call('HINCRBY', job_key(job), 'errors', errors - (old_errors or 0))
if errors > 0 then
  redis.call('HSET', job_key(job, 'bad'), chunk, errors)
else
  redis.call('HDEL', job_key(job, 'bad'), chunk)
  redis.call('HDEL', job_key(job, 'in'), chunk) -- only chunks with error rows may run again
end
local done = redis.call('HINCRBY', job_key(job), 'done', 1)
if state == 'canceling' then
  finalise_when_let_go(job)
elseif done == num_chunks then
  to_finalising(job)
end
return 'committed'
