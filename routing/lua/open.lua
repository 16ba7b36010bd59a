--[[ open: declare the room complete; from now on it makes offers.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] epoch   a name for this filling of the room
  Returns {"opened"} | {"open"}: somebody had done it
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/fleet

if redis.call("HSETNX", META, "epoch", ARGV[1]) == 1 then return { "opened" } end
return { "open" }
