--[[ open_queue: declare a queue complete, so that its jobs are offered.
  Keys: meta
  Takes
    epoch: int        the number that the database gave to this filling of the queue; names of leases begin with it
  Returns
    answer: "opened" | "open" | "lost"
      open: another process has opened it      lost: Redis has lost what was filled since begin_rebuild
  Writes only on "opened"
  Called by routing/queue/fleets.py: Fleets.open
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/epoch

local found = redis.call("HMGET", META, "copy", "lost")
if found[1] ~= replication_id() or found[2] then return "lost" end
if redis.call("HSETNX", META, "epoch", epoch) == 0 then return "open" end
redis.call("HSET", META, "number", epoch)
return "opened"
