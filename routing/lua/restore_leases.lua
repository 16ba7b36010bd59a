--[[ restore_leases: write leases again, as the database has them, after Redis has lost them.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    lease_ms: int
    leases: [{lease: {job_id: text, name: text, owner: text, slot: text},
              lane: text, job: {constraints: text, seq: int, created_ms: int, deadline_ms: int}}]
      deadline_ms   0: none
      owner ""      an open offer of a queued job that is to be resumed in that slot; skipped if another holds it
  Returns
    restored: int
  A job that waits in an open queue, or has a lease, is left as it is; but until the queue is open, a run's lease
  replaces an open offer of the same slot
  If another job holds the slot, a run's lease is displaced, see lib/leases
  Called by routing/queue/leases.py: Leases.restore
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-1, SLOT-1 ]]
-- @include lib/epoch
-- @include lib/leases
-- @include lib/now_ms

local now, restored = now_ms(), 0
local is_complete = is_open(now)
for _, lost in ipairs(leases) do
  local lease, lane, job = lost.lease, parse_lane(lost.lane), lost.job
  -- A job that waits has ended its run since the database was read; while the queue is filled it may have begun one.
  local member = lane_member(lease.job_id, job.created_ms)
  if not is_complete then remove_from_lane(lane, member) end
  local waits = redis.call("ZSCORE", lane_key(lane.name), member)
  local present = read_lease(lease.job_id)
  local is_slot_taken = lease.owner == "" and get_field(SLOTS, lease.slot)
  if not is_complete and present and present.owner == "" and lease.owner ~= "" and present.slot == lease.slot then
    -- The offer was restored while the run that had claimed it before was being started.
    redis.call("HSET", lease_key(lease.job_id), "lease", lease.name, "owner", lease.owner)
    redis.call("ZADD", LEASES, integer_text(now + lease_ms), lease.job_id)
    update_open_offers(lease.job_id, lease.owner)
    restored = restored + 1
  elseif not is_complete and present and present.name == lease.name then
    redis.call("HSET", lease_key(lease.job_id), "seq", score_in_lane(lane.model, job)) -- The policy may have changed.
  elseif not waits and not is_slot_taken and not present then
    write_lease(lease.job_id, lease.name, lease.owner, lease.slot, lane, job.constraints,
      score_in_lane(lane.model, job), job.created_ms, 0, 0, now, now + lease_ms)
    remove_free_slot(lease.slot)
    redis.call("ZREM", COOLING, lease.slot)
    restored = restored + 1
  end
end
flush_hashes()
return restored
