-- lease: who holds a job's slot, and how it is given up.

-- LEASE-4: a lease is renewed or freed only by its holder, who knows both its name and its owner.
local function is_held(job, lease, owner)
  local held = redis.call("HMGET", lease_key(job), "lease", "owner")
  return held[1] == lease and held[2] == owner
end

-- Remove the lease; answers where the job stood and which slot it had.
local function drop_lease(job)
  local was = redis.call("HMGET", lease_key(job), "slot", "lane", "offset", "seq")
  redis.call("DEL", lease_key(job))
  redis.call("ZREM", LEASES, job)
  if redis.call("HGET", SLOTS, was[1]) == job then redis.call("HDEL", SLOTS, was[1]) end
  return { slot = was[1], lane = was[2], offset = was[3], seq = was[4] }
end
