--[[ renew: give running jobs more time, each if the caller still holds it.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] owner   ARGV[2] lease_ms
  ARGV[3] epoch, ARGV[4] offers: as the caller's last renewal was answered; "" and 0: there was none
  ARGV[5…] job, lease of each
  Returns {epoch, offers, {"renewed" | "cancel" | "lost" | "unknown", …} in the order asked}
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

local owner, now, answers = ARGV[1], now_ms(), {}
heed_loss(ARGV[3], tonumber(ARGV[4]))
local is_complete = is_open(now)
for i = 5, #ARGV, 2 do
  local job, lease = ARGV[i], ARGV[i + 1]
  local answer
  if is_held(job, lease, owner) then
    redis.call("ZADD", LEASES, exact(now + tonumber(ARGV[2])), job)
    charge_so_far(job, now)
    answer = redis.call("HEXISTS", lease_key(job), "cancel") == 1 and "cancel" or "renewed"
  else
    answer = is_complete and "lost" or "unknown"
  end
  answers[#answers + 1] = answer
end
local epoch, offers = field(META, "epoch") or "", number_in_field(META, "offers")
write_fields()
return { epoch, offers, answers }
