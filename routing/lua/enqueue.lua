--[[ enqueue: put queued jobs into their lanes, and offer what can run at once, in the same step.
  Keys: classes, groups, kinds, lanes, rules, free, cooling, slots, leases, servers, tags, stats, held, meta
  Takes
    offering: {prefix: text, limit: int, capacity: int, offer_ms: int, claimant: text, lease_ms: int}
      see lib/offers
    with_position: flag      return also where the first of the jobs stands
    entries: [{lane: text, job: {constraints: text, seq: int, id: text, created_ms: int, deadline_ms: int}}]
      deadline_ms   0: none
  Returns
    added: int
    offers: [{job_id: text, lease: text, slot: text, server: text, model: text, number: int,
              owner: text, changes_model: flag}]
    ahead: int | None   jobs of its model that come before it; None: it holds a lease, or this was not asked for
    run_ms: int | None  mean slot time of the model's latest runs; None: unknown
  Idempotent: a job that waits already gets the score of the present policy, which differs only if it came in before
    sync_catalog; one that holds a lease goes to its place when that is released
  Refused when Redis is full
  Called by routing/queue/queues.py: Queues.enqueue_command
  Clock Redis TIME    Cost O(log n) a job, and that of job_status for a position    Upholds ORDER-1, SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/offers
-- @include lib/position

-- A job that still holds a lease returns to its lane when that is released: its last run has ended in the database and
-- has not freed its slot yet.  An open offer stays, and gets the score of the present policy.
local function requeue_on_release(job, lane)
  redis.call("HSET", lease_key(job.id), "seq", score_in_lane(lane.model, job))
  if redis.call("HGET", lease_key(job.id), "owner") ~= "" then redis.call("HSET", lease_key(job.id), "again", "1") end
end

-- Put the jobs into their lanes.  Returns how many were not there yet.
local function add_entries()
  local ids, lanes, added = {}, {}, 0
  for n, entry in ipairs(entries) do ids[n] = entry.job.id end
  local leased = #ids > 0 and redis.call("ZMSCORE", LEASES, unpack(ids)) or {}
  for n, entry in ipairs(entries) do
    local job, name = entry.job, entry.lane
    if leased[n] then
      requeue_on_release(job, parse_lane(name))
    else
      lanes[name] = lanes[name] or { lane = parse_lane(name), constraints = job.constraints, members = {} }
      local members = lanes[name].members
      members[#members + 1] = score_in_lane(lanes[name].lane.model, job)
      members[#members + 1] = lane_member(job.id, job.created_ms)
    end
  end
  for _, batch in pairs(lanes) do
    added = added + add_to_lane(batch.lane, unpack(batch.members))
    load_rules(batch.lane)
    reindex(batch.lane, batch.constraints) -- Even if none was added: the score of the first may be another.
  end
  return added
end

local added = add_entries()
local offers = make_offers(offering, now_ms())
flush_hashes()
local ahead, run_ms
if with_position then
  ahead, run_ms = position_of(parse_lane(entries[1].lane), entries[1].job)
end
return { added, offers, ahead or false, run_ms or false }
