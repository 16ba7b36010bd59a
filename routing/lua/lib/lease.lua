-- lease: who holds a job's slot.

-- LEASE-4: a lease is renewed or freed only by its holder, who knows both its name and its owner.
local function is_held(job, lease, owner)
  local held = redis.call("HMGET", lease_key(job), "lease", "owner")
  return held[1] == lease and held[2] == owner
end

-- An offer is open as long as its lease has no owner.
local function note_owner(job, owner, number)
  if owner == "" then redis.call("ZADD", open_key(), number, job) else redis.call("ZREM", open_key(), job) end
end
