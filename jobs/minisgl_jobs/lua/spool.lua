-- Keeps finished results of a leased chunk. A result is set once; those that are there already are left as they are.
-- Refused by a full Redis: the worker keeps them until the chunk is committed.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  chunk
-- ARGV[3]  token
-- ARGV[4]  batch     the results, compressed
-- ARGV[5]  rows      of the chunk that are finished with these, or with those in its part
-- ARGV[6...]         "row.sample" of each; there may be none
--
-- Returns the number of new results, or 'stale'.

local job, chunk, token, batch = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if not holds(job, chunk, token) then
  return 'stale'
end
local spool = spool_key(job, chunk)
local found = redis.call('HMGET', spool, 'n', unpack(ARGV, 6))
local number = tonumber(found[1] or 0) + 1
local fields = {'rows', ARGV[5], 'n', number, 'b' .. number, batch}
local num_new = 0
for i = 6, #ARGV do
  if not found[i - 4] then
    table.insert(fields, ARGV[i])
    table.insert(fields, number)
    num_new = num_new + 1
  end
end
redis.call('HSET', spool, unpack(num_new > 0 and fields or {'rows', ARGV[5]}))
return num_new
