--[[ seize: take a lease over, under a new name, so that its former holder can do nothing with it any more.
  Keys: leases, meta
  Takes
    lease: {job_id: text, name: text, owner: text}      as last seen
    new_name: text
    owner: text             "": it is offered again, as number 0, for a run that its server may be at
    lease_ms: int
    only_expired: flag      refuse a lease that has been renewed meanwhile
  Returns
    answer: "seized" | "lost"
  Writes only on "seized"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, LEASE-4 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/lease

local job, now = lease.job_id, now_ms()
if not is_held(job, lease.name, lease.owner) then return "lost" end
if only_expired and tonumber(redis.call("ZSCORE", LEASES, job) or "0") > now then return "lost" end

redis.call("HSET", lease_key(job), "lease", new_name, "owner", owner)
if owner == "" then redis.call("HSET", lease_key(job), "offer", 0) end
note_owner(job, owner, 0)
redis.call("ZADD", LEASES, exact(now + lease_ms), job)
return "seized"
