-- Sends one message of a job's tokens: into the stream, for replay, and to the channel, with equal content. Each names
-- its predecessor, so that a reader sees a gap.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  message
-- ARGV[3]  max_len   messages that the stream keeps, about
-- ARGV[4]  ttl_ms    of the stream
--
-- Returns the message's id.

local job, message, max_len, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local stream = job_key(job, 'tokens')
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
local previous = last and last[1] or '0-0'
local id = redis.call('XADD', stream, 'MAXLEN', '~', max_len, '*', 'previous', previous, 'message', message)
redis.call('PEXPIRE', stream, ttl_ms)
redis.call('PUBLISH', job_key(job, 'events'), 'tokens ' .. previous .. ' ' .. id .. ' ' .. message)
return id
