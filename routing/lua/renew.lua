--[[ renew: give running jobs more time, each if the caller still holds it.
  Keys: classes, groups, kinds, lanes, rules, leases, tags, stats, held, meta
  Takes
    owner: text, lease_ms: int
    known_epoch: text, known_offers: int      as the last renewal was answered; "" and 0: there was none
    leases: [{job_id: text, name: text}]
  Returns
    epoch: text, offers: int
    answers: ["renewed" | "cancel" | "lost" | "unknown"]      in the order asked
      cancel   renewed, and somebody wants the job canceled
      unknown  Redis has been emptied, or has lost its last moments, and is not filled yet: nobody can say
  With fewer offers than there were in that epoch the room is closed until it is filled again
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-4 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/fields
-- @include lib/epoch
-- @include lib/rules
-- @include lib/order
-- @include lib/policies
-- @include lib/groups
-- @include lib/lanes
-- @include lib/lease

-- What a run has used of its slot beyond what has been charged, if the model's policy charges it while it goes on.
local function charge_so_far(job, now)
  local was = redis.call("HMGET", lease_key(job), "lane", "since", "charged")
  local lane, used_ms, charged = read_lane(was[1]), now - tonumber(was[2]), tonumber(was[3])
  local policy = policy_of(lane.model)
  if policy.charge_renewal and used_ms > charged then
    policy.charge_renewal(lane, used_ms - charged)
    redis.call("HSET", lease_key(job), "charged", exact(used_ms))
    reindex_account(lane.account)
  end
end

local now, answers = now_ms(), {}
heed_loss(known_epoch, known_offers)
local is_complete = is_open(now)
for n, lease in ipairs(leases) do
  local job, answer = lease.job_id
  if is_held(job, lease.name, owner) then
    redis.call("ZADD", LEASES, exact(now + lease_ms), job)
    charge_so_far(job, now)
    answer = redis.call("HEXISTS", lease_key(job), "cancel") == 1 and "cancel" or "renewed"
  else
    answer = is_complete and "lost" or "unknown"
  end
  answers[n] = answer
end
local epoch, offers = field(META, "epoch") or "", number_in_field(META, "offers")
write_fields()
return { epoch, offers, answers }
