-- lease: who holds a job's slot.

-- LEASE-4: a lease is renewed or freed only by its holder, who knows both its name and its owner.
local function holds(lease, name, owner) return lease and lease.name == name and lease.owner == owner end

local function is_held(job, name, owner)
  local found = redis.call("HMGET", lease_key(job), "lease", "owner")
  return holds({ name = found[1], owner = found[2] }, name, owner)
end

-- A job's lease as it stands; nil: there is none.
local function read_lease(job)
  local found = redis.call("HMGET", lease_key(job), "lease", "owner", "slot", "lane", "needs", "seq", "created",
    "offer", "since", "charged", "again")
  if not found[1] then return nil end
  return { job = job, name = found[1], owner = found[2], slot = found[3], lane = read_lane(found[4]),
    constraints = found[5], seq = found[6], created = found[7], offer = found[8], since = tonumber(found[9]),
    charged = tonumber(found[10]), again = found[11] }
end

-- An offer is open as long as its lease has no owner.
local function note_owner(job, owner, number)
  if owner == "" then redis.call("ZADD", open_key(), number, job) else redis.call("ZREM", open_key(), job) end
end
