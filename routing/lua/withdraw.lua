--[[ withdraw: take a waiting job out of the room, or ask the holder of its lease to cancel it.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane
  Returns {"withdrawn"} | {"asked"} | {"absent"}      Writes nothing on "absent"
  Cost O(log n) ]]
-- @include lib/fleet

local job, lane = ARGV[1], ARGV[2]
if redis.call("ZREM", lane_key(lane), job) == 1 then
  reindex(lane)
  return { "withdrawn" }
end
if redis.call("EXISTS", lease_key(job)) == 1 then
  redis.call("HSET", lease_key(job), "cancel", "1")
  return { "asked" }
end
return { "absent" }
