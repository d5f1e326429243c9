-- Wakes the idle workers.
--
-- KEYS[1]  the queue's prefix

ring_bell()
