--[[ list_leases: the leases of a fleet, those that expire first come first.
  Keys: leases
  Takes
    only_expired: flag
    limit: int        at most so many; -1: all
  Returns
    leases: [{lease: {job_id: text, name: text, owner: text, slot: text}, left_ms: int}]
      left_ms   until it expires; below 0: since then
  Writes nothing
  Called by routing/queue/leases.py: Leases.list_expired, routing/queue/leases.py: Leases.list_all
  Clock Redis TIME    Cost O(leases returned) ]]
-- @include lib/keys
-- @include lib/now_ms

local now, found = now_ms(), {}
local until_ms = only_expired and integer_text(now) or "+inf"
local leases = redis.call("ZRANGEBYSCORE", LEASES, "-inf", until_ms, "WITHSCORES", "LIMIT", 0, limit)
for i = 1, #leases, 2 do
  local job, lease = leases[i], redis.call("HMGET", lease_key(leases[i]), "lease", "owner", "slot")
  if lease[1] then found[#found + 1] = { { job, lease[1], lease[2], lease[3] }, tonumber(leases[i + 1]) - now } end
end
return found
