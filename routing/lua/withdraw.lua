--[[ withdraw: take a waiting job out of the room, or ask the holder of its lease to cancel it.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    job: {id: text, created_ms: int}, lane: text
  Returns
    answer: "withdrawn" | "freed" | "asked" | "absent"      freed: nobody had taken its offer up, so its slot is free
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

if take_from_lane(read_lane(lane), member_of(job.id, job.created_ms)) then
  write_fields()
  return "withdrawn"
end
-- One that is offered again may still run at its server: whoever takes it up finds out.
local lease = read_lease(job.id)
if lease and lease.owner == "" and lease.offer ~= "0" then
  local now = now_ms()
  return_slot(lease.slot, now, 0, drop_lease(lease, now))
  doubt_loaded(lease)
  write_fields()
  return "freed"
end
if lease then
  redis.call("HSET", lease_key(job.id), "cancel", "1")
  redis.call("HDEL", lease_key(job.id), "again") -- it would come back to the room when its last run frees the slot
  return "asked"
end
return "absent"
