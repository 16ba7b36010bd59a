--[[ restore: write the leases of running jobs again, as the record knows them, after Redis has lost them.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] lease_ms   ARGV[2…] job, lease, owner, slot, lane, needs, seq, created of each
  Returns how many were written; a job that has a lease is left alone, and so is one that waits in an open room
  Where another holds the slot by now, the lease stands beside, see lib/holding
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-1, SLOT-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/slots
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/lease
-- @include lib/holding

local now, restored = now_ms(), 0
local is_complete = is_open(now)
for i = 2, #ARGV, 8 do
  local job, slot, it = ARGV[i], ARGV[i + 3], read_lane(ARGV[i + 4])
  -- One that waits has ended its run since the record was read; while the room is filled it may have begun it.
  local member = member_of(job, ARGV[i + 7])
  if not is_complete then take_from_lane(it, member) end
  local waits = redis.call("ZSCORE", lane_key(it.name), member)
  if not waits and redis.call("EXISTS", lease_key(job)) == 0 then
    write_lease(job, ARGV[i + 1], ARGV[i + 2], slot, it, ARGV[i + 5], ARGV[i + 6], ARGV[i + 7], 0, 0, now,
      now + tonumber(ARGV[1]))
    redis.call("ZREM", FREE, slot)
    redis.call("ZREM", RESTING, slot)
    restored = restored + 1
  end
end
write_fields()
return restored
