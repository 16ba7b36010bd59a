--[[ depths: how many jobs wait in each lane, and how the fleet's slots stand.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  Returns {rebuilt 0|1, free, resting, taken, {lane, jobs}…}      Writes nothing
  Cost O(lanes) ]]
-- @include lib/fleet

local lanes = {}
for _, lane in ipairs(redis.call("ZRANGE", LANES, 0, -1)) do
  lanes[#lanes + 1] = { lane, redis.call("ZCARD", lane_key(lane)) }
end
return { redis.call("HEXISTS", META, "epoch"), redis.call("ZCARD", FREE), redis.call("ZCARD", RESTING),
  redis.call("HLEN", SLOTS), lanes }
