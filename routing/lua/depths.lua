--[[ depths: how many jobs of each model wait, and how the fleet's slots stand.
  KEYS[1..14] the fleet's keys, see lib/fleet
  Returns {rebuilt 0|1, free, resting, taken, {model, jobs}…}      Writes nothing
  Cost O(models) ]]
-- @include lib/fleet

local waiting = {}
local meta = redis.call("HGETALL", META)
for i = 1, #meta, 2 do
  local model = string.match(meta[i], "^waiting:(.*)$")
  if model then waiting[#waiting + 1] = { model, tonumber(meta[i + 1]) } end
end
return { redis.call("HEXISTS", META, "epoch"), redis.call("ZCARD", FREE), redis.call("ZCARD", RESTING),
  redis.call("HLEN", SLOTS), waiting }
