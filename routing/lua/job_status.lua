--[[ job_status: where a job stands, and what of its tenant is in its way.
  Keys: classes, groups, lanes, rules, leases, tags, stats, held
  Takes
    job: {id: text, created_ms: int, deadline_ms: int}, lane: text      deadline_ms 0: none
    as_last: flag             of a job that would come in now
  Returns
    location: "waiting" | "offered" | "absent"
    ahead: int                jobs of its model that come before it; with more than 512 lanes before it an estimate
    run_ms: int | None        mean slot time of the model's latest runs; None: unknown
    blocked_by: text          tenant_paused, tenant_frozen, tenant_slots, max_slots; "": nothing of its tenant
    held: int                 slots that its account holds
    jobs_before: [text]       up to five jobs of its own lane that come just before it, the next one last
  Writes nothing
  Called by routing/queue/queues.py: Queues.job_status_command
  Cost O(lanes before it log n), of about 512 lanes ]]
-- @include lib/position

local waiting, before = parse_lane(lane), {}
local member, ahead, run_ms = lane_member(job.id, job.created_ms), position_of(waiting, job, as_last)
local location = ahead and "waiting" or redis.call("EXISTS", lease_key(job.id)) == 1 and "offered" or "absent"
local rank = redis.call("ZRANK", lane_key(waiting.name), member) or 0
if rank > 0 then before = redis.call("ZRANGE", lane_key(waiting.name), math.max(rank - 5, 0), rank - 1) end
for i, other in ipairs(before) do before[i] = parse_lane_member(other) end
return { location, ahead or 0, run_ms or false,
  tenant_blocked_by(waiting.tenant, waiting.account, rules_of(waiting.model)) or "",
  get_number(HELD, waiting.account), before }
