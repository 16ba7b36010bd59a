--[[ queue_counts: how many jobs of each model wait, and how many slots are free, in cooldown and taken.
  Keys: free, cooling, slots, meta
  Returns
    is_open: flag, free: int, cooling: int, taken: int
    waiting: {text: int}      jobs by model; models without any are left out
    epoch: int                the last one that was opened here; 0: none was
  Writes nothing
  Called by routing/queue/fleets.py: Fleets.counts
  Cost O(models) ]]
-- @include lib/epoch

local waiting, number = {}, "0"
local meta = redis.call("HGETALL", META)
for i = 1, #meta, 2 do
  local model = string.match(meta[i], "^waiting:(.*)$")
  if model then waiting[#waiting + 1] = { model, tonumber(meta[i + 1]) } end
  if meta[i] == "number" then number = meta[i + 1] end
end
return { is_open() and 1 or 0, redis.call("ZCARD", FREE), redis.call("ZCARD", COOLING),
  redis.call("HLEN", SLOTS), waiting, tonumber(number) }
