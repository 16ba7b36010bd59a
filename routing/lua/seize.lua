--[[ seize: take a lease over under a new name, so that its former holder can neither renew nor release it.
  Keys: leases, meta
  Takes
    lease: {job_id: text, name: text, owner: text}      as last seen
    new_name: text          without the epoch, with which it will begin
    owner: text             "": an open offer, number 0, of a job that its server may already be running
    lease_ms: int
    only_expired: flag      refuse a lease that has been renewed meanwhile
  Returns
    name: text              the new name; "": the lease is another's, or was renewed
  Writes only if the lease was seized
  Called by routing/queue/leases.py: Leases.seize
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, LEASE-4 ]]
-- @include lib/leases
-- @include lib/now_ms

local job, now = lease.job_id, now_ms()
if not is_held_by(job, lease.name, lease.owner) then return "" end
if only_expired and tonumber(redis.call("ZSCORE", LEASES, job) or "0") > now then return "" end

local name = lease_name(new_name)
redis.call("HSET", lease_key(job), "lease", name, "owner", owner)
if owner == "" then redis.call("HSET", lease_key(job), "offer", 0) end
update_open_offers(job, owner, 0)
redis.call("ZADD", LEASES, integer_text(now + lease_ms), job)
return name
