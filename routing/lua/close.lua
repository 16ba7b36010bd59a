--[[ close: what the room was filled from is no longer so: nothing is offered until it has been filled again.
  Keys: meta
  Takes
    version: int      of the catalog that the caller saw in the room; with another one nothing is done
  Returns
    answer: "closed" | "changed"
  Writes only on "closed"
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/fleet

if tonumber(redis.call("HGET", META, "catalog") or nil) ~= version then return "changed" end
redis.call("HDEL", META, "epoch")
redis.call("HSET", META, "lost", "1")
return "closed"
