--[[ enqueue: put queued jobs in the waiting room, and offer what can run at once, in the same step.
  Keys: classes, groups, kinds, lanes, rules, free, resting, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, room: int, offer_ms: int, taker: text, lease_ms: int}      see lib/offer
    place: flag       say where the last job stands then
    entries: [{lane: text, job: {needs: text, seq: int, id: text, created_ms: int}}]
  Returns
    added: int
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int, owner: text}]
    ahead: int | None   how many jobs of its model come before the last job; None: it holds a lease, or nobody asked
    run_ms: int | None  mean slot time of the model's latest runs; None: not known yet, or nobody asked
  Idempotent: a job that waits already is left as it is; one that holds a lease goes to its place when that is released
  Clock Redis TIME    Cost O(log n) a job, and that of wait_facts if asked    Upholds ORDER-1, SLOT-2 ]]
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
-- @include lib/ahead

local ids, lanes, added = {}, {}, 0
for n, entry in ipairs(entries) do ids[n] = entry.job.id end
local leased = #ids > 0 and redis.call("ZMSCORE", LEASES, unpack(ids)) or {}
for n, entry in ipairs(entries) do
  local job, name = entry.job, entry.lane
  if leased[n] then
    -- Its last run has ended in the record and not freed its slot yet: the job goes to its place when that happens.
    if redis.call("HGET", lease_key(job.id), "owner") ~= "" then redis.call("HSET", lease_key(job.id), "again", "1") end
  else
    lanes[name] = lanes[name] or { lane = read_lane(name), needs = job.needs, members = {} }
    local members = lanes[name].members
    members[#members + 1], members[#members + 2] = job.seq, member_of(job.id, job.created_ms)
  end
end
for _, entering in pairs(lanes) do
  local more = add_to_lane(entering.lane, unpack(entering.members))
  if more > 0 then
    read_rules(entering.lane)
    reindex(entering.lane, entering.needs)
  end
  added = added + more
end
local offers = make_offers(offering, now_ms())
write_fields()
local last, ahead, run_ms = entries[#entries], nil, nil
if place then ahead, run_ms = place_of(read_lane(last.lane), last.job.id, last.job.created_ms) end
return { added, offers, ahead or false, run_ms or false }
