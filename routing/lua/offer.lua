--[[ offer: offer waiting jobs to free slots, as many as fit.  The sweep calls it, and a worker that looks for work.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, room: int, offer_ms: int, claimant: text, lease_ms: int}
      see lib/offer; its claimant gets the oldest open offer, if there is one
  Returns
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]
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
local function claim_oldest(now)
  local job = redis.call("ZRANGE", open_key(), 0, 0)[1]
  if not job or not is_open(now) then return nil end -- the slot may be another's by now
  local lease = redis.call("HMGET", lease_key(job), "lease", "slot", "lane", "offer")
  local owner = offering.claimant
  redis.call("HSET", lease_key(job), "owner", owner)
  redis.call("ZADD", LEASES, exact(now + offering.lease_ms), job)
  note_owner(job, owner)
  return { job, lease[1], lease[2], server_of(lease[2]), read_lane(lease[3]).model, tonumber(lease[4]), owner }
end

local now = now_ms()
local oldest = offering.claimant ~= "" and offering.limit > 0 and claim_oldest(now) or nil
if oldest then offering.limit, offering.claimant = offering.limit - 1, "" end
local offers = make_offers(offering, now)
if oldest then table.insert(offers, 1, oldest) end
write_fields()
return offers
