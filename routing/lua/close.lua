--[[ close: what the room was filled from is no longer so: nothing is offered until it has been filled again.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] version   of the catalog that the caller saw in the room; with another one nothing is done
  Returns {"closed"} | {"changed"}      Writes only on "closed"
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/fleet

if redis.call("HGET", META, "catalog") ~= ARGV[1] then return { "changed" } end
redis.call("HDEL", META, "epoch")
redis.call("HSET", META, "lost", "1")
return { "closed" }
