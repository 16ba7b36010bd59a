--[[ enter: put one job in the waiting room as enqueue does, and say where it stands then.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, room: int, offer_ms: int, claimant: text, lease_ms: int}      see lib/offer
    entry: {lane: text, job: {constraints: text, seq: int, id: text, created_ms: int}}
  Returns
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]
    ahead: int | None   how many jobs of its model come before it; None: it holds a lease
    run_ms: int | None  mean slot time of the model's latest runs; None: not known yet
  Idempotent, as enqueue is
  Refused when Redis is full
  Clock Redis TIME    Cost O(log n), and that of queue_status    Upholds ORDER-1, SLOT-2 ]]
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
-- @include lib/ahead

put_in({ entry })
local offers = make_offers(offering, now_ms())
write_fields()
local ahead, run_ms = place_of(read_lane(entry.lane), entry.job.id, entry.job.created_ms)
return { offers, ahead or false, run_ms or false }
