--[[ expired: the leases whose time is over.
  Keys: leases
  Takes
    limit: int
  Returns
    leases: [{job_id: text, name: text, owner: text, slot: text}]      longest expired first
  Writes nothing
  Clock Redis TIME    Cost O(expired) ]]
-- @include lib/now_ms
-- @include lib/fleet

local found = {}
for _, job in ipairs(redis.call("ZRANGEBYSCORE", LEASES, "-inf", exact(now_ms()), "LIMIT", 0, limit)) do
  local was = redis.call("HMGET", lease_key(job), "lease", "owner", "slot")
  if was[1] then found[#found + 1] = { job, was[1], was[2], was[3] } end
end
return found
