--[[ withdraw: take a job out of the queue, or mark its lease as canceled.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    job: {id: text, created_ms: int}, lane: text
  Returns
    answer: "withdrawn" | "freed" | "asked" | "absent"
      freed: it had an open offer, whose slot is free now      asked: the holder of its lease reads the mark (renew)
  Writes nothing on "absent"
  Called by routing/queue/queues.py: Queues.withdraw
  Clock Redis TIME    Cost O(log n) ]]
-- @include lib/leases
-- @include lib/now_ms

if remove_from_lane(parse_lane(lane), lane_member(job.id, job.created_ms)) then
  flush_hashes()
  return "withdrawn"
end
-- A job that is offered again (number 0) may still run at its server: the worker that claims it finds out.
local lease = read_lease(job.id)
if lease and lease.owner == "" and lease.offer ~= "0" then
  local now = now_ms()
  make_slot_available(lease.slot, now, 0, delete_lease(lease, now))
  clear_loaded_model(lease)
  flush_hashes()
  return "freed"
end
if lease then
  redis.call("HSET", lease_key(job.id), "cancel", "1")
  redis.call("HDEL", lease_key(job.id), "again") -- or it would return to its lane when its last run frees the slot
  return "asked"
end
return "absent"
