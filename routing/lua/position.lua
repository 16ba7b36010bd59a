--[[ position: how many jobs of its model come before a waiting one.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane
  Returns {"waiting", ahead} | {"offered"} | {"absent"}      Writes nothing
  Cost O(lanes log n) ]]
-- @include lib/fleet

local job, lane = ARGV[1], ARGV[2]
local seq = redis.call("ZSCORE", lane_key(lane), job)
if not seq then
  return { redis.call("EXISTS", lease_key(job)) == 1 and "offered" or "absent" }
end
local key = tonumber(redis.call("HGET", OFFSETS, lane) or "0") + tonumber(seq)
local ahead = 0
for _, other in ipairs(redis.call("ZRANGEBYSCORE", LANES, "-inf", "(" .. exact(key))) do
  if model_of(other) == model_of(lane) then
    local offset = tonumber(redis.call("HGET", OFFSETS, other) or "0")
    ahead = ahead + redis.call("ZCOUNT", lane_key(other), "-inf", "(" .. exact(key - offset))
  end
end
return { "waiting", ahead }
