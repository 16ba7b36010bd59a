--[[ discard_queue: close a queue of which a newer one was filled elsewhere.  All of it is deleted before it is filled
  again.
  Keys: meta
  Takes
    epoch: int        the last epoch, as the caller saw it here; if it is another one, nothing is done
  Returns
    answer: "closed" | "changed"
  Writes only on "closed"
  Called by routing/queue/fleets.py: Fleets.discard
  Cost O(1)    Upholds QUEUE-2 ]]
-- @include lib/epoch

if tonumber(redis.call("HGET", META, "number") or "0") ~= epoch then return "changed" end
redis.call("HDEL", META, "epoch")
redis.call("HSET", META, "lost", LOST)
return "closed"
