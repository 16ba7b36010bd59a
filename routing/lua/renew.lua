--[[ renew: give running jobs more time, each if the caller still holds it.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] owner   ARGV[2] lease_ms   ARGV[3…] job, lease of each
  Returns {"renewed" | "cancel" | "lost" | "unknown", …} in the order asked
    cancel   renewed, and somebody wants the job canceled
    unknown  Redis has been emptied and not been rebuilt: nobody can say
  Writes only for "renewed" and "cancel"
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-4 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/lease

local owner, expires, answers = ARGV[1], exact(now_ms() + tonumber(ARGV[2])), {}
local rebuilt = redis.call("HEXISTS", META, "epoch") == 1
for i = 3, #ARGV, 2 do
  local job, lease = ARGV[i], ARGV[i + 1]
  local answer
  if is_held(job, lease, owner) then
    redis.call("ZADD", LEASES, expires, job)
    answer = redis.call("HEXISTS", lease_key(job), "cancel") == 1 and "cancel" or "renewed"
  else
    answer = rebuilt and "lost" or "unknown"
  end
  answers[#answers + 1] = answer
end
return answers
