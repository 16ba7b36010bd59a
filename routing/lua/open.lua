--[[ open: declare the room complete; from now on it makes offers.
  Keys: meta
  Takes
    epoch: text       a name for this filling of the room
  Returns
    answer: "opened" | "open" | "lost"
      open: somebody had done it      lost: what was filled since begin is not all there
  Writes only on "opened"
  Cost O(1)    Upholds ORDER-1 ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch

local known = redis.call("HMGET", META, "copy", "lost")
if known[1] ~= copy_id() or known[2] then return "lost" end
if redis.call("HSETNX", META, "epoch", epoch) == 1 then return "opened" end
return "open"
