--[[ restore: write leases again, as the record knows them, after Redis has lost them.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    lease_ms: int
    leases: [{lease: {job_id: text, name: text, owner: text, slot: text},
              lane: text, job: {constraints: text, seq: int, created_ms: int}}]
  Returns
    restored: int     a job that waits in an open room is left alone, and so is one that has a lease; but until the room
                      is open a run's lease replaces an open offer of the same slot
  Where another holds the slot by now, a run's lease stands beside, see lib/holding
  owner "": an open offer, to a queued job that is to be resumed in that slot; none if another holds it by now
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
for _, lost in ipairs(leases) do
  local lease, lane, job = lost.lease, read_lane(lost.lane), lost.job
  -- One that waits has ended its run since the record was read; while the room is filled it may have begun it.
  local member = member_of(lease.job_id, job.created_ms)
  if not is_complete then take_from_lane(lane, member) end
  local waits = redis.call("ZSCORE", lane_key(lane.name), member)
  local standing = read_lease(lease.job_id)
  local is_passed_on = lease.owner == "" and field(SLOTS, lease.slot)
  if not is_complete and standing and standing.owner == "" and lease.owner ~= "" and standing.slot == lease.slot then
    -- The offer was restored while the run that had claimed it before was being started.
    redis.call("HSET", lease_key(lease.job_id), "lease", lease.name, "owner", lease.owner)
    redis.call("ZADD", LEASES, exact(now + lease_ms), lease.job_id)
    note_owner(lease.job_id, lease.owner)
    restored = restored + 1
  elseif not waits and not is_passed_on and not standing then
    write_lease(lease.job_id, lease.name, lease.owner, lease.slot, lane, job.constraints, job.seq,
      job.created_ms, 0, 0, now, now + lease_ms)
    redis.call("ZREM", FREE, lease.slot)
    redis.call("ZREM", COOLING, lease.slot)
    restored = restored + 1
  end
end
write_fields()
return restored
