-- lease: who holds a job's slot.

-- LEASE-4: a lease is renewed or freed only by its holder, who knows both its name and its owner.
local function is_held(job, lease, owner)
  local held = redis.call("HMGET", lease_key(job), "lease", "owner")
  return held[1] == lease and held[2] == owner
end
