--[[ keep: give an open offer that no worker has taken up yet more time, as long as it may still be started.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lease   ARGV[3] offer_ms
  ARGV[4] resumes "1": its server may be at it already, so it stays where it is whatever is paused
  Returns {"kept"} | {"closed"}: its server, model or tenant starts nothing now | {"lost"}: it is no open offer
  Writes only on "kept"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, ORDER-1 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/slots
-- @include lib/rules
-- @include lib/lease

local function is_stopped(state) return state == "paused" or state == "frozen" end

local job = ARGV[1]
if not is_held(job, ARGV[2], "") then return { "lost" } end
local held = redis.call("HMGET", lease_key(job), "slot", "lane")
local lane = read_lane(held[2])
local closed = not is_online_slot(held[1]) or is_stopped(rules_of(lane.model).state)
  or is_stopped(field(RULES, "tenant " .. lane.tenant))
if closed and ARGV[4] ~= "1" then return { "closed" } end

redis.call("ZADD", LEASES, exact(now_ms() + tonumber(ARGV[3])), job)
return { "kept" }
