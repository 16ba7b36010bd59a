--[[ withdraw: take a waiting job out of the room, or ask the holder of its lease to cancel it.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lane   ARGV[3] created
  Returns {"withdrawn"} | {"freed"}: nobody had taken its offer up, so its slot is free | {"asked"} | {"absent"}
  Writes nothing on "absent"
  Clock Redis TIME    Cost O(log n) ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/lease
-- @include lib/holding

local job = ARGV[1]
if take_from_lane(read_lane(ARGV[2]), member_of(job, ARGV[3])) then
  write_fields()
  return { "withdrawn" }
end
-- One that is offered again may still run at its server: whoever takes it up finds out.
local held = read_lease(job)
if held and held.owner == "" and held.offer ~= "0" then
  local now = now_ms()
  return_slot(held.slot, now, 0, drop_lease(held, now))
  write_fields()
  return { "freed" }
end
if held then
  redis.call("HSET", lease_key(job), "cancel", "1")
  redis.call("HDEL", lease_key(job), "again") -- it would come back to the room when its last run frees the slot
  return { "asked" }
end
return { "absent" }
