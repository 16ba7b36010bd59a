--[[ extend_offer: give an open offer more time, as long as its job may still be started there.
  Keys: rules, leases, servers, meta
  Takes
    lease: {job_id: text, name: text}, offer_ms: int
    resumes: flag       its server may be running the job already, so the offer stays whatever is paused
  Returns
    answer: "kept" | "closed" | "lost"
      closed: its server, model or tenant starts nothing now      lost: it is not an open offer
  Writes only on "kept"
  Called by routing/queue/leases.py: Leases.extend_offer
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, ORDER-1 ]]
-- @include lib/leases
-- @include lib/now_ms

local job = lease.job_id
if not is_held_by(job, lease.name, "") then return "lost" end
local slot, name = unpack(redis.call("HMGET", lease_key(job), "slot", "lane"))
local lane = parse_lane(name)
local closed = not is_online_slot(slot) or is_stopped(rules_of(lane.model).state)
  or is_stopped(get_field(RULES, "tenant " .. lane.tenant))
if closed and not resumes then return "closed" end

redis.call("ZADD", LEASES, integer_text(now_ms() + offer_ms), job)
return "kept"
