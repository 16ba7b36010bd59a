--[[ offer: offer waiting jobs to free slots, as many as fit.  The sweep calls it, and a worker that looks for work.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] prefix    random text that makes the names of new leases unique
  ARGV[2] limit     offers to make at most
  ARGV[3] room      how many offers may be open at once: runs that workers have room for
  ARGV[4] offer_ms  how long an offer stays open
  ARGV[5] taker     who gets the first at once, for ARGV[6] lease_ms: the oldest open offer, if there is one; "": nobody
  Returns {{job, lease, slot, server, model, number, owner}…}
  Clock Redis TIME    Cost O(offers (groups + free slots + log n))    Upholds SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/slots
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/breaker
-- @include lib/lease
-- @include lib/holding
-- @include lib/placement
-- @include lib/offer

-- Its message is lost, or nobody has had room to read it.
local function claim_oldest(owner, now, lease_ms)
  local job = redis.call("ZRANGE", open_key(), 0, 0)[1]
  if not job then return nil end
  local held = redis.call("HMGET", lease_key(job), "lease", "slot", "lane", "offer")
  redis.call("HSET", lease_key(job), "owner", owner)
  redis.call("ZADD", LEASES, exact(now + lease_ms), job)
  note_owner(job, owner)
  return { job, held[1], held[2], server_of(held[2]), read_lane(held[3]).model, tonumber(held[4]), owner }
end

local limit, now, taker, lease_ms = tonumber(ARGV[2]), now_ms(), ARGV[5], tonumber(ARGV[6])
local oldest = taker ~= "" and limit > 0 and claim_oldest(taker, now, lease_ms) or nil
if oldest then limit, taker = limit - 1, "" end
local offers = make_offers(limit, tonumber(ARGV[3]), ARGV[1], now, tonumber(ARGV[4]), taker, lease_ms)
if oldest then table.insert(offers, 1, oldest) end
write_fields()
return offers
