--[[ depths: how many jobs of each model wait, and how the fleet's slots stand.
  Keys: free, cooling, slots, meta
  Returns
    open: flag, free: int, cooling: int, taken: int
    waiting: {text: int}      jobs by model, of those that have some
  Writes nothing
  Cost O(models) ]]
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch

local waiting = {}
local meta = redis.call("HGETALL", META)
for i = 1, #meta, 2 do
  local model = string.match(meta[i], "^waiting:(.*)$")
  if model then waiting[#waiting + 1] = { model, tonumber(meta[i + 1]) } end
end
return { is_open() and 1 or 0, redis.call("ZCARD", FREE), redis.call("ZCARD", COOLING),
  redis.call("HLEN", SLOTS), waiting }
