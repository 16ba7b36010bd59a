--[[ queue_status: what stands between a job and its start.
  Keys: classes, groups, lanes, rules, leases, tags, stats, held
  Takes
    job: {id: text, created_ms: int}, lane: text
    as_last: flag             of one that would come in now
  Returns
    place: "waiting" | "offered" | "absent"
    ahead: int                jobs of its model that come before it; with more than 512 lanes before it an estimate
    run_ms: int | None        mean slot time of the model's latest runs; None: not known yet
    obstacle: text            tenant_paused, tenant_frozen or tenant_slots; "": nothing is in its tenant's way
    held: int                 slots that its account holds
    state: text               of the model: online, draining, paused, frozen
    breaker: "closed" | "open" | "half_open" | "probing", open_until_ms: int, open_why: text      of the model
    before: [text]            up to five jobs of its own lane that come just before it, the next one last
  Writes nothing
  Clock Redis TIME    Cost O(lanes before it log n), of about 512 lanes ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/breaker
-- @include lib/ahead

local waiting, now, before = read_lane(lane), now_ms(), {}
local member, ahead, run_ms = member_of(job.id, job.created_ms), place_of(waiting, job.id, job.created_ms, as_last)
local place = ahead and "waiting" or redis.call("EXISTS", lease_key(job.id)) == 1 and "offered" or "absent"
local rank = redis.call("ZRANK", lane_key(waiting.name), member) or 0
if rank > 0 then before = redis.call("ZRANGE", lane_key(waiting.name), math.max(rank - 5, 0), rank - 1) end
for i, other in ipairs(before) do before[i] = read_member(other) end
local rules, breaker = rules_of(waiting.model), breaker_of(stats_key("model", waiting.model))
return { place, ahead or 0, run_ms or false, obstacle(waiting.tenant, waiting.account, rules) or "",
  number_in_field(HELD, waiting.account), rules.state, breaker_state(breaker, now), breaker.until_ms, breaker.why,
  before }
