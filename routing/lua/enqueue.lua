--[[ enqueue: put queued jobs in the waiting room, and offer what can run at once, in the same step.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, room: int, offer_ms: int, claimant: text, lease_ms: int}      see lib/offer
    entries: [{lane: text, job: {constraints: text, seq: int, id: text, created_ms: int}}]
  Returns
    added: int
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]
  Idempotent: a job that waits already is left as it is; one that holds a lease goes to its place when that is released
  Refused when Redis is full
  Clock Redis TIME    Cost O(log n) a job    Upholds ORDER-1, SLOT-2 ]]
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
-- @include lib/entering

local added = put_in(entries)
local offers = make_offers(offering, now_ms())
write_fields()
return { added, offers }
