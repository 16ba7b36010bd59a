--[[ withdraw: take a waiting job out of the room, or ask the holder of its lease to cancel it.
  KEYS[1..12] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane   ARGV[3] created
  Returns {"withdrawn"} | {"asked"} | {"absent"}      Writes nothing on "absent"
  Cost O(log n) ]]
-- @include lib/fleet
-- @include lib/order
-- @include lib/lanes

local job = ARGV[1]
if take_from_lane(read_lane(ARGV[2]), member_of(job, ARGV[3])) then return { "withdrawn" } end
if redis.call("EXISTS", lease_key(job)) == 1 then
  redis.call("HSET", lease_key(job), "cancel", "1")
  return { "asked" }
end
return { "absent" }
