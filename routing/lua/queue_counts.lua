--[[ queue_counts: how many jobs of each model wait, and how many slots are free, in cooldown and taken.
  Keys: free, cooling, slots, meta
  Returns
    is_open: flag, free: int, cooling: int, taken: int
    waiting: {text: int}      jobs by model; models without any are left out
  Writes nothing
  Called by routing/queue/fleets.py: Fleets.counts
  Cost O(models) ]]
-- @include lib/epoch

local waiting = {}
local meta = redis.call("HGETALL", META)
for i = 1, #meta, 2 do
  local model = string.match(meta[i], "^waiting:(.*)$")
  if model then waiting[#waiting + 1] = { model, tonumber(meta[i + 1]) } end
end
return { is_open() and 1 or 0, redis.call("ZCARD", FREE), redis.call("ZCARD", COOLING),
  redis.call("HLEN", SLOTS), waiting }
