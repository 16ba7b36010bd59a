--[[ claim: make an open offer a lease of its caller.
  Keys: leases, meta
  Takes
    offer: {job_id: text, lease: text}
    owner: text       not empty
    lease_ms: int
  Returns
    claimed: {job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text,
              changes_model: flag} | None
      None: it is gone, another's, or the caller's already
  Writes only if it was open
  Called by routing/queue/leases.py: Leases.claim_command
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1 ]]
-- @include lib/epoch
-- @include lib/leases
-- @include lib/now_ms

local job, now = offer.job_id, now_ms()
local lease = read_lease(job)
if not is_holder(lease, offer.lease, "") then return false end
if not is_open(now) then return false end -- the slot may be another's by now

redis.call("HSET", lease_key(job), "owner", owner)
renew_lease(job, now, lease_ms)
update_open_offers(job, owner)
return { job, lease.name, lease.slot, server_of(lease.slot), lease.lane.model, tonumber(lease.offer), owner,
  lease.changes_model and 1 or 0 }
