--[[ open: declare the room complete; from now on it makes offers.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] epoch   a name for this filling of the room
  Returns {"opened"} | {"open"}: somebody had done it | {"lost"}: what was filled since begin is not all there
  Writes only on "opened"
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch

local known = redis.call("HMGET", META, "copy", "lost")
if known[1] ~= copy_id() or known[2] then return { "lost" } end
if redis.call("HSETNX", META, "epoch", ARGV[1]) == 1 then return { "opened" } end
return { "open" }
