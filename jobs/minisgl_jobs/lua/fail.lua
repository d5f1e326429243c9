-- Takes a job out of the queue whose records the caller found to be damaged.
--
-- KEYS[1]  the queue's prefix
-- ARGV[1]  job
-- ARGV[2]  why

write_when_full()
fail_damaged(ARGV[1], ARGV[2])
