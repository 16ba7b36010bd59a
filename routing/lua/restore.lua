--[[ restore: write the leases of running jobs again, as the record knows them, after Redis was emptied.
  KEYS[1..8]  the fleet's keys, see lib/fleet
  ARGV[1] lease_ms   ARGV[2…] job, lease, owner, slot, lane, offset, seq of each
  Returns how many were written; a job that waits, and a job or slot that has a lease, is left alone
  Clock Redis TIME    Cost O(jobs log leases)    Upholds LEASE-1 ]]
-- @include lib/now_ms
-- @include lib/fleet

local expires, restored = exact(now_ms() + tonumber(ARGV[1])), 0
for i = 2, #ARGV, 7 do
  local job, slot = ARGV[i], ARGV[i + 3]
  local waits = redis.call("ZSCORE", lane_key(ARGV[i + 4]), job) -- its run has ended since the record was read
  if not waits and redis.call("EXISTS", lease_key(job)) == 0 and redis.call("HEXISTS", SLOTS, slot) == 0 then
    redis.call("HSET", lease_key(job), "lease", ARGV[i + 1], "owner", ARGV[i + 2], "slot", slot, "lane", ARGV[i + 4],
      "offset", ARGV[i + 5], "seq", ARGV[i + 6], "offer", 0)
    redis.call("ZADD", LEASES, expires, job)
    redis.call("HSET", SLOTS, slot, job)
    redis.call("ZREM", FREE, slot)
    redis.call("ZREM", RESTING, slot)
    restored = restored + 1
  end
end
return restored
