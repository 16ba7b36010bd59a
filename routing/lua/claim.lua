--[[ claim: make an open offer one's own.
  Keys: leases, meta
  Takes
    offer: {job_id: text, lease: text}
    owner: text       not empty
    lease_ms: int
  Returns
    claimed: {job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text} | None
      None: it is gone, another's, or the caller's already
  Writes only if it was open
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/lease

local job, now = offer.job_id, now_ms()
local lease = read_lease(job)
if not holds(lease, offer.lease, "") then return false end
if not is_open(now) then return false end -- the slot may be another's by now

redis.call("HSET", lease_key(job), "owner", owner)
redis.call("ZADD", LEASES, exact(now + lease_ms), job)
note_owner(job, owner)
return { job, lease.name, lease.slot, server_of(lease.slot), lease.lane.model, tonumber(lease.offer), owner }
