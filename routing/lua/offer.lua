--[[ offer: offer waiting jobs to free slots.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, capacity: int, offer_ms: int, claimant: text, lease_ms: int}
      see lib/offers; the claimant gets the oldest open offer, if there is one
  Returns
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int,
              owner: text, changes_model: flag}]
  Called by routing/queue/queues.py: Queues.offer_command
  Clock Redis TIME    Cost O(offers (groups + free slots + log n))    Upholds SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/offers

-- Claim the oldest open offer: its message is lost, or no worker had a free place to read it.
local function claim_oldest(now)
  local job = redis.call("ZRANGE", open_offers_key(), 0, 0)[1]
  if not job or not is_open(now) then return nil end -- the slot may be another's by now
  local lease, owner = read_lease(job), offering.claimant
  redis.call("HSET", lease_key(job), "owner", owner)
  redis.call("ZADD", LEASES, integer_text(now + offering.lease_ms), job)
  update_open_offers(job, owner)
  return { job, lease.name, lease.slot, server_of(lease.slot), lease.lane.model, tonumber(lease.offer), owner,
    lease.changes_model and 1 or 0 }
end

local now = now_ms()
local oldest = offering.claimant ~= "" and offering.limit > 0 and claim_oldest(now) or nil
if oldest then offering.limit, offering.claimant = offering.limit - 1, "" end
local offers = make_offers(offering, now)
if oldest then table.insert(offers, 1, oldest) end
flush_hashes()
return offers
