--[[ check_lease: renew a lease if its job may use the slot now.
  Keys: slots, leases, meta
  Takes
    lease: {job_id: text, name: text, owner: text, slot: text}
    lease_ms: int
  Returns
    answer: "held" | "displaced" | "lost"
      displaced   another job holds the slot: Redis had lost this lease, and it was restored
      lost        it has expired and was taken, or Redis was emptied and is not filled yet
  Writes only on "held"
  A worker that was suspended calls it before it starts a job or sends a request
  Called by routing/queue/leases.py: Leases.check_command
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, SLOT-1 ]]
-- @include lib/epoch
-- @include lib/leases
-- @include lib/now_ms

local now = now_ms()
if not is_open(now) or not is_held_by(lease.job_id, lease.name, lease.owner) then return "lost" end
if redis.call("HGET", SLOTS, lease.slot) ~= lease.job_id then return "displaced" end
renew_lease(lease.job_id, now, lease_ms)
return "held"
