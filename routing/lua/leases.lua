--[[ leases: all leases of a fleet, and how long each lasts.
  Keys: leases
  Returns
    leases: [{lease: {job_id: text, name: text, owner: text, slot: text}, left_ms: int}]
  Writes nothing
  Clock Redis TIME    Cost O(leases) ]]
-- @include lib/now_ms
-- @include lib/fleet

local now, found = now_ms(), {}
local leases = redis.call("ZRANGE", LEASES, 0, -1, "WITHSCORES")
for i = 1, #leases, 2 do
  local job, was = leases[i], redis.call("HMGET", lease_key(leases[i]), "lease", "owner", "slot")
  if was[1] then found[#found + 1] = { { job, was[1], was[2], was[3] }, tonumber(leases[i + 1]) - now } end
end
return found
