--[[ close_queue: close a queue that was filled from an outdated catalog; nothing is offered until it is filled again.
  Keys: meta
  Takes
    version: int      of the catalog that the caller saw in the queue; if it is another one, nothing is done
  Returns
    answer: "closed" | "changed"
  Writes only on "closed"
  Called by routing/queue/fleets.py: Fleets.close
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/epoch

if tonumber(redis.call("HGET", META, "catalog") or nil) ~= version then return "changed" end
close_for_refill()
return "closed"
