--[[ renew: renew the leases of running jobs, each if the caller still holds it.
  Keys: classes, groups, kinds, lanes, rules, leases, tags, stats, held, meta
  Takes
    owner: text, lease_ms: int
    known_epoch: text, known_offers: int      as the last renewal returned them; "" and 0: there was none
    leases: [{job_id: text, name: text}]
  Returns
    epoch: text, offers: int
    answers: ["renewed" | "cancel" | "lost" | "unknown"]      in the order of the leases
      cancel   renewed, and the job shall be canceled
      unknown  Redis was emptied, or has lost its last moments, and is not filled yet
  If Redis knows of fewer offers than it had made in that epoch, the queue is closed until it is filled again
  Called by routing/queue/leases.py: Leases.renew
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-4 ]]
-- @include lib/epoch
-- @include lib/leases
-- @include lib/now_ms

-- Charge what a run has used of its slot beyond what was charged, if the model's policy charges runs while they last.
local function charge_so_far(job, now)
  local found = redis.call("HMGET", lease_key(job), "lane", "since", "charged")
  local lane, used_ms, charged = parse_lane(found[1]), now - tonumber(found[2]), tonumber(found[3])
  local policy = policy_of(lane.model)
  if policy.charge_renewal and used_ms > charged then
    policy.charge_renewal(lane, used_ms - charged)
    redis.call("HSET", lease_key(job), "charged", integer_text(used_ms))
    reindex_account(lane.account)
  end
end

local now, answers = now_ms(), {}
close_if_offers_were_lost(known_epoch, known_offers)
local is_complete = is_open(now)
for n, lease in ipairs(leases) do
  local job, answer = lease.job_id
  if is_held_by(job, lease.name, owner) then
    renew_lease(job, now, lease_ms)
    charge_so_far(job, now)
    answer = redis.call("HEXISTS", lease_key(job), "cancel") == 1 and "cancel" or "renewed"
  else
    answer = is_complete and "lost" or "unknown"
  end
  answers[n] = answer
end
local epoch, offers = get_field(META, "epoch") or "", get_number(META, "offers")
flush_hashes()
return { epoch, offers, answers }
