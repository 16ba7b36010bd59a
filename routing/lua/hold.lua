--[[ hold: give a lease more time if its slot may be used for its job now.
  Keys: slots, leases, meta
  Takes
    lease: {job_id: text, name: text, owner: text, slot: text}
    lease_ms: int
  Returns
    answer: "held" | "beside" | "lost"
      beside   another job holds the slot: Redis had lost this lease, and it was written again
      lost     it has expired and was taken, or Redis was emptied and is not filled yet
  Writes only on "held"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, SLOT-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/lease

local now = now_ms()
if not is_open(now) or not is_held(lease.job_id, lease.name, lease.owner) then return "lost" end
if redis.call("HGET", SLOTS, lease.slot) ~= lease.job_id then return "beside" end
redis.call("ZADD", LEASES, exact(now + lease_ms), lease.job_id)
return "held"
