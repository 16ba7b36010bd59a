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
-- @include lib/order
-- @include lib/groups
-- @include lib/lanes
-- @include lib/lease
-- @include lib/holding

-- A long run is charged while it goes on, lest its tenant look idle until it ends (policy fair).
local function charge_so_far(job, now)
  local was = redis.call("HMGET", lease_key(job), "lane", "since", "charged")
  local it, since, charged = read_lane(was[1]), tonumber(was[2]), tonumber(was[3])
  if rules_of(it.model).policy == "fair" and now - since > charged then
    redis.call("HSET", lease_key(job), "charged", exact(charge_use(it, since, charged, now)))
    reindex_account(it.account)
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
