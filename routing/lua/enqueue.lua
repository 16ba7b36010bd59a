--[[ enqueue: put queued jobs in the waiting room, and offer what can run at once, in the same step.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] prefix   random text that makes the names of new leases unique
  ARGV[2] limit    offers to make at most
  ARGV[3] room     how many offers may be open at once: runs that workers have room for
  ARGV[4] offer_ms how long an offer stays open
  ARGV[5] place    "1": say where the last job stands then
  ARGV[6…]         lane, needs, seq, job, created of each job
  Returns {added, {job, lease, slot, server, model, number, owner}…, ahead, run_ms}
    ahead    how many jobs of its model come before the last job; -1: it holds a lease, or that was not asked
    run_ms   mean slot time of the model's latest runs, ms; 0: not known yet, or that was not asked
  Idempotent: a job that waits already is left as it is; one that holds a lease goes to its place when that is released
  Clock Redis TIME    Cost O(log n) a job, and that of position if asked    Upholds ORDER-1, SLOT-2 ]]
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

local jobs, lanes, added = {}, {}, 0
for i = 6, #ARGV, 5 do jobs[#jobs + 1] = ARGV[i + 3] end
local leased = #jobs > 0 and redis.call("ZMSCORE", LEASES, unpack(jobs)) or {}
for n, job in ipairs(jobs) do
  local i = 5 * n + 1
  local lane, needs, seq, created = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 4]
  if leased[n] then
    -- Its last run has ended in the record and not freed its slot yet: the job goes to its place when that happens.
    if redis.call("HGET", lease_key(job), "owner") ~= "" then redis.call("HSET", lease_key(job), "again", "1") end
  else
    lanes[lane] = lanes[lane] or { it = read_lane(lane), needs = needs, members = {} }
    local members = lanes[lane].members
    members[#members + 1], members[#members + 2] = seq, member_of(job, created)
  end
end
for _, lane in pairs(lanes) do
  local more = add_to_lane(lane.it, unpack(lane.members))
  if more > 0 then
    read_rules(lane.it)
    reindex(lane.it, lane.needs)
  end
  added = added + more
end
local offers = make_offers(tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[1], now_ms(), tonumber(ARGV[4]), "", 0)
write_fields()
local ahead, run_ms
if ARGV[5] == "1" then ahead, run_ms = place_of(read_lane(ARGV[#ARGV - 4]), ARGV[#ARGV - 1], ARGV[#ARGV]) end
return { added, offers, ahead or -1, run_ms or 0 }
