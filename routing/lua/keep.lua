--[[ keep: give an open offer that no worker has taken up yet more time, as long as it may still be started.
  Keys: rules, leases, servers
  Takes
    lease: {job_id: text, name: text}, offer_ms: int
    resumes: flag       its server may be at it already, so it stays where it is whatever is paused
  Returns
    answer: "kept" | "closed" | "lost"
      closed: its server, model or tenant starts nothing now      lost: it is no open offer
  Writes only on "kept"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, ORDER-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots
-- @include lib/rules
-- @include lib/lease

local function is_stopped(state) return state == "paused" or state == "frozen" end

local job = lease.job_id
if not is_held(job, lease.name, "") then return "lost" end
local slot, name = unpack(redis.call("HMGET", lease_key(job), "slot", "lane"))
local lane = read_lane(name)
local closed = not is_online_slot(slot) or is_stopped(rules_of(lane.model).state)
  or is_stopped(field(RULES, "tenant " .. lane.tenant))
if closed and not resumes then return "closed" end

redis.call("ZADD", LEASES, exact(now_ms() + offer_ms), job)
return "kept"
