--[[ seize: take a lease over, under a new name, so that its former holder can do nothing with it any more.
  KEYS[1..14] the fleet's keys, see lib/fleet
  ARGV[1] job   ARGV[2] lease   ARGV[3] owner, as last seen   ARGV[4] new_lease   ARGV[5] new_owner
  new_owner ""  it is offered again, as number 0, for a run that its server may be at
  ARGV[6] lease_ms   ARGV[7] only_expired: "1" refuses a lease that has been renewed meanwhile
  Returns {"seized"} | {"lost"}      Writes only on "seized"
  Clock Redis TIME    Cost O(log leases)    Upholds LEASE-1, LEASE-4 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/lease

local job, now = ARGV[1], now_ms()
if not is_held(job, ARGV[2], ARGV[3]) then return { "lost" } end
if ARGV[7] == "1" and tonumber(redis.call("ZSCORE", LEASES, job) or "0") > now then return { "lost" } end

redis.call("HSET", lease_key(job), "lease", ARGV[4], "owner", ARGV[5])
if ARGV[5] == "" then redis.call("HSET", lease_key(job), "offer", 0) end
note_owner(job, ARGV[5], 0)
redis.call("ZADD", LEASES, exact(now + tonumber(ARGV[6])), job)
return { "seized" }
