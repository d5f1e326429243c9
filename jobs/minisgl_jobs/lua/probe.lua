-- Notes which rows of a chunk that has killed workers run next, alone. When the worker dies, they are the suspects.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  chunk
-- ARGV[3]  token
-- ARGV[4]  start     first row
-- ARGV[5]  stop      row after the last
--
-- Returns 'ok' or 'stale'.

local job, chunk, token, start, stop = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

write_when_full()
if not holds(job, chunk, token) then
  return 'stale'
end
local poison = load_poison(job, chunk)
poison.probe = {start, stop}
save_poison(job, chunk, poison)
return 'ok'
